"""Owns the crossing between host and device: small buffers, pinned on CUDA, reused in turn, each guarded by an event, so that
no copy in flight is overwritten and the host waits for no more than the copy it asks for. Does not know what crosses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Landing:
    """A device to host copy that has been enqueued."""

    buffer: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """Block until the copy has landed; its values."""
        if self.event is not None:
            self.event.synchronize()
        return self.buffer.tolist()


def download(source: Tensor) -> Landing:
    """Copy `source`, int32, to a host buffer of its own, in stream order: for what is too rare and too large for a ring."""
    buffer = torch.empty(source.numel(), dtype=torch.int32, pin_memory=source.is_cuda)
    buffer.copy_(source.flatten(), non_blocking=True)
    event = torch.cuda.Event() if source.is_cuda else None
    if event is not None:
        event.record()
    return Landing(buffer, event)


class PinnedRing:
    """`depth` int32 host buffers of `size` words. A buffer comes round again after `depth` uses,
    which must exceed what is in flight."""

    def __init__(self, size: int, device: torch.device, depth: int = 8) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(depth)]
        self._events = [torch.cuda.Event() if self._cuda else None for _ in range(depth)]
        self._turn = 0

    def upload(self, values: Sequence[int], into: Tensor) -> None:
        """Copy `values` to the front of `into [n]` int32 on the device, in stream order."""
        buffer, event = self._next()
        buffer[: len(values)] = torch.tensor(values, dtype=torch.int32)
        into[: len(values)].copy_(buffer[: len(values)], non_blocking=True)
        if event is not None:
            event.record()

    def download(self, source: Tensor) -> Landing:
        """Copy `source`, int32, to the host, in stream order."""
        buffer, event = self._next()
        target = buffer[: source.numel()]
        target.copy_(source.flatten(), non_blocking=True)
        if event is not None:
            event.record()
        return Landing(target, event)

    def _next(self) -> tuple[Tensor, torch.cuda.Event | None]:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer, event = self._buffers[self._turn], self._events[self._turn]
        if event is not None:
            event.synchronize()
        return buffer, event
