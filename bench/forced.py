"""Owns teacher forcing: the logits at every position of given ids, the first ones through prefill and the rest through decode
steps, each fed from the list and not from the sampler. Does not own what the logits are judged by (rule_n, reference).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.decode_graph import DecodeGraphs
from runtime.decode_step import DecodeStep, pack
from runtime.request import Request

STAGGER = 7
"""Positions between two neighbouring fillers, so that the rows of a step differ in length; coprime to the usual block sizes."""


@dataclass(frozen=True)
class _Row:
    """One row of every step: its ids, and how many of them are in the cache when the steps begin."""

    ids: Sequence[int]
    prefilled: int

    def at(self, step: int) -> int:
        """The position this row writes; a filler that has come to its end begins again at 0."""
        return (self.prefilled + step) % len(self.ids)


@torch.inference_mode()
def forced_logits(step: DecodeStep, graph: bool, ids: Sequence[int], prefill: int, chunk: int, rows: int = 1) -> list[Tensor]:
    """Logits at every position of `ids`, `[T, V]` float32 on the host.

    Args:
        step: an engine's decode step; its cache and state are written over.
        graph: capture the step and replay it; else play it eagerly.
        prefill: how many ids go through prefill, in chunks of `chunk`; the others are decoded one by one.
        rows: rows of every decode step, in slots 0 to rows - 1. Above 1 the ids play in row 0 and again in the last row, among
            fillers of seeded random ids at staggered positions.

    Returns:
        The logits of row 0, and with rows above 1 those of the last row.
    """
    model, cache, state = step.model, step.cache, step.state
    played = [_Row(ids, prefill)] * min(rows, 2)
    played[1:1] = [_filler(i, len(ids), prefill, model.vocab_size) for i in range(1, rows - 1)]
    judged = [0] if rows == 1 else [0, rows - 1]
    logits = [torch.empty((len(ids), model.vocab_size), dtype=torch.float32) for _ in judged]
    for slot, row in enumerate(played):
        for start in range(0, row.prefilled, chunk):
            end = min(start + chunk, row.prefilled)
            hidden = model.prefill(torch.tensor(row.ids[start:end], device=model.device), start, slot, cache)
            if slot in judged:
                logits[judged.index(slot)][start:end] = model.logits(hidden).cpu()
    slots = torch.arange(rows, dtype=torch.int32, device=model.device)
    words = [pack(Request("forced", (0,)), limit=cache.capacity) for _ in played]
    state.packed[:rows] = torch.tensor(words, dtype=torch.int32)
    play = _player(step, slots, graph)
    for number in range(len(ids) - prefill):
        positions = [row.at(number) for row in played]
        tokens = [row.ids[position] for row, position in zip(played, positions, strict=True)]
        state.token[:rows] = torch.tensor(tokens, dtype=torch.int32, device=model.device)
        state.position[:rows] = torch.tensor(positions, dtype=torch.int32, device=model.device)
        state.done[:rows] = 0
        step_rows = play()  # [B, V]
        for out, row_index in zip(logits, judged, strict=True):
            out[prefill + number] = step_rows[row_index]
    return logits


def _filler(number: int, length: int, prefill: int, vocab_size: int) -> _Row:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return _Row(ids, (prefill + STAGGER * number) % length)


def _player(step: DecodeStep, slots: Tensor, graph: bool) -> Callable[[], Tensor]:
    """One step over `slots`, eager or as a graph; gives its logits `[B, V]`."""
    if not graph:
        return lambda: step(slots, "plain")[1]
    step(torch.full_like(slots, -1), "plain")  # on idle rows: compiles, and makes the workspace
    graphs = DecodeGraphs(step, slots)
    graphs.capture([len(slots)], ["plain"])
    return lambda: graphs.replay(len(slots), "plain").logits
