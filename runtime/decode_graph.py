"""Owns the decode step captured in CUDA graphs, one for each batch size and kind of draw, and its replay.

Does not own the step itself (decode_step) or when a mode changes (engine).
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.decode_step import DecodeStep
from runtime.sampling import Variant


@dataclass(frozen=True)
class DecodeGraph:
    """One captured step. What is told of the draws, `[B]` or `[B, words]` int32, and logits `[B, V]` float32 are static: the
    next replay writes over them."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    logits: Tensor


class DecodeGraphs:
    """A decode step captured for many batch sizes in one memory pool.

    Args:
        step: what is captured.
        slot_of_row: `[max_slots]` int32; a replay of B rows reads its first B. The caller writes it in stream order.
    """

    def __init__(self, step: DecodeStep, slot_of_row: Tensor) -> None:
        self._step = step
        self._slot_of_row = slot_of_row
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, Variant], DecodeGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, batches: Iterable[int], variants: Iterable[Variant]) -> None:
        """Capture every (batch, variant), the largest batch first so that the others fit in its memory.

        Kernels must be compiled and workspaces made before: play each once on idle rows. The garbage collector rests meanwhile,
        since freeing a tensor would spoil a capture; other threads may use the device.
        """
        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()
        try:
            for batch in sorted(batches, reverse=True):
                for variant in variants:
                    self._graphs[batch, variant] = self._capture(batch, variant)
        finally:
            if collecting:
                gc.enable()

    def _capture(self, batch: int, variant: Variant) -> DecodeGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tokens, logits = self._step(self._slot_of_row[:batch], variant)
            finally:
                graph.capture_end()
        return DecodeGraph(graph, tokens, logits)

    def replay(self, batch: int, variant: Variant) -> DecodeGraph:
        """Enqueue one step for the first `batch` rows; its outputs hold until the next replay."""
        captured = self._graphs[batch, variant]
        captured.graph.replay()
        return captured
