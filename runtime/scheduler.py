"""Owns which request has which slot, whose prompt is computed next, who is finished, and which ids' K and V each slot holds.

Pure Python: no tensor, no clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne

from runtime.request import FinishReason, Request


@dataclass(eq=False)
class Running:
    """A request that holds a slot.

    Attributes:
        limit: the index at which a drawn token is the last.
        cached: prompt tokens whose K/V were taken over and not computed.
        prefilled: prompt tokens whose K/V are written or enqueued.
        length: prompt and produced tokens that the host has read.
        last: the last produced token that the host has read.
        finish: why it ended; its slot is free from then on, and tokens still in flight are dropped.
    """

    request: Request
    slot: int
    limit: int
    cached: int = 0
    prefilled: int = 0
    length: int = 0
    last: int | None = None
    finish: FinishReason | None = None

    @property
    def decoding(self) -> bool:
        return self.prefilled == len(self.request.prompt_ids)


class Scheduler:
    """First come, first served over a fixed number of slots, each of `capacity` positions.

    A slot keeps its ids when its request ends. A prompt starts behind the longest beginning that any slot holds: in that slot,
    or with a copy of it. What counts as held is certainly enqueued: whole chunks of prompts, and a produced token once the next
    one has been read (it was drawn from a step that wrote the former). The device works in that order, so whoever comes later
    finds it there.
    """

    def __init__(self, slots: int, capacity: int, prefix_reuse: bool = False) -> None:
        self.capacity = capacity
        self._reuse = prefix_reuse
        self._free = list(range(slots))  # the least recently used one first
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._asked = [0] * slots  # the length of the prompt computed there last: so many of the ids held
        self._waiting: deque[Request] = deque()
        self._running: list[Running] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_positions(self) -> int:
        return sum(running.length for running in self._running)

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
            admitted.append(Running(request, self._take(request), limit, length=length))
        self._running += admitted
        return admitted

    def next_prefill(self) -> Running | None:
        """The oldest request whose prompt is not yet computed."""
        return next((r for r in self._running if not r.decoding), None)

    def begin(self, running: Running) -> int:
        """Settle where a prompt's computation starts, just before its first chunk: `cached` and `prefilled` are set.

        The last token of a prompt is computed in any case, as the first answer token is drawn from its logits; unless the very
        same prompt has been: then all of it is prefilled, and the same question has the same answer, bit by bit.

        Returns:
            The slot from which `prefilled` positions (and the last token's hidden state, if that is all of them) must be taken:
            the request's own or another.
        """
        prompt, own = running.request.prompt_ids, running.slot
        best, running.prefilled = own, running.request.cached
        if self._reuse and running.request.prompt_logprobs is None:
            common = [_common(held, prompt) for held in self._held]
            best = max(range(len(common)), key=lambda slot: (common[slot], self._asked[slot] == len(prompt), slot == own))
            running.cached = min(common[best], len(prompt) - 1)
            same = common[best] == len(prompt) == self._asked[best]
            running.prefilled = len(prompt) if same else running.cached
        self._held[own] = list(prompt[: running.prefilled])
        self._asked[own] = len(prompt)
        return best

    def advance(self, running: Running, tokens: int) -> None:
        """Count a chunk of a prompt that has been enqueued."""
        start, running.prefilled = running.prefilled, running.prefilled + tokens
        self._held[running.slot] += running.request.prompt_ids[start : running.prefilled]

    def decoding(self) -> list[Running]:
        """Requests with a row in the next decode step, oldest first."""
        return [r for r in self._running if r.decoding]

    def commit(self, running: Running, token: int) -> FinishReason | None:
        """Count a token that the host has read; the reason if it ended its request. The device decides by the same rule."""
        if running.last is not None:
            self._held[running.slot].append(running.last)
        running.last = token
        running.length += 1
        if token < 0:
            self._held[running.slot].clear()  # what gave such logits is not worth keeping
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

    def _take(self, request: Request) -> int:
        """The free slot that holds most of the prompt's beginning; but the least recently used one where the former would lose
        more than it keeps (a chat's thousand ids for a greeting in common: that is copied)."""
        if self._reuse:
            best = max(self._free, key=lambda slot: _common(self._held[slot], request.prompt_ids))
            if 2 * _common(self._held[best], request.prompt_ids) >= len(self._held[best]):
                self._free.remove(best)
                return best
        return self._free.pop(0)

    def _release(self, running: Running, reason: FinishReason) -> None:
        running.finish = reason
        self._running.remove(running)
        self._free.append(running.slot)


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Ids that both begin with, compared without a Python loop: a prompt can have 100,000."""
    return next(compress(count(), map(ne, held, prompt)), min(len(held), len(prompt)))
