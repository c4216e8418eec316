"""Owns which request has which slot, whose prompt is computed next and who is finished. Pure Python: no tensor, no clock."""

from collections import deque
from dataclasses import dataclass

from runtime.request import FinishReason, Request


@dataclass(eq=False)
class Running:
    """A request that holds a slot.

    Attributes:
        limit: the index at which a drawn token is the last.
        prefilled: prompt tokens whose K/V are written or enqueued.
        length: prompt and produced tokens that the host has read.
        finish: why it ended; its slot is free from then on, and tokens still in flight are dropped.
    """

    request: Request
    slot: int
    limit: int
    prefilled: int = 0
    length: int = 0
    finish: FinishReason | None = None

    @property
    def decoding(self) -> bool:
        return self.prefilled == len(self.request.prompt_ids)


class Scheduler:
    """First come, first served over a fixed number of slots, each of `capacity` positions."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(slots - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._running: list[Running] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def admit(self) -> list[Running]:
        """Give free slots to those who wait; those admitted now."""
        admitted = []
        while self._free and self._waiting:
            request = self._waiting.popleft()
            length = len(request.prompt_ids)
            last = self.capacity - 1
            limit = last if request.max_tokens is None else min(length + request.max_tokens - 1, last)
            admitted.append(Running(request, self._free.pop(), limit, prefilled=request.cached, length=length))
        self._running += admitted
        return admitted

    def next_prefill(self) -> Running | None:
        """The oldest request whose prompt is not yet computed."""
        return next((r for r in self._running if not r.decoding), None)

    def decoding(self) -> list[Running]:
        """Requests with a row in the next decode step, oldest first."""
        return [r for r in self._running if r.decoding]

    def commit(self, running: Running, token: int) -> FinishReason | None:
        """Count a token that the host has read; the reason if it ended its request. The device decides by the same rule."""
        running.length += 1
        if token < 0:
            self._release(running, "error")
        elif token in running.request.end_ids:
            self._release(running, "stop")
        elif running.length - 1 >= running.limit:
            self._release(running, "length")
        return running.finish

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; whether there was one to end."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        for running in self._running:
            if running.request.id == request_id:
                self._release(running, "cancelled")
                return True
        return False

    def _release(self, running: Running, reason: FinishReason) -> None:
        running.finish = reason
        self._running.remove(running)
        self._free.append(running.slot)
