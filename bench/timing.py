"""Owns the clock: one pass over a batch, from the prompts' arrival to the last token, the rates that follow from it, and the
cells of a matrix that take turns. Does not own who computes the tokens (contenders) or what is said of them (report).
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.errors import DeviceError, RequestError

FORMULAS = {
    "ttft_ms": "a prompt's arrival (all of a batch arrive together) to its first token",
    "itl_ms": "gap between two successive steps' tokens once every stream of the batch has its first token",
    "tpot_ms": "(end to end - first token) / (n - 1), from the moment when every stream of the batch has its first token; "
    "n - 1 counts the tokens that arrived after that moment, so prefill is outside",
    "decode_tok_s": "tokens that arrived after that moment, over all streams / the time they took",
    "prefill_tok_s": "batch x prompt length / time until every stream has its first token",
    "end_to_end_tok_s": "all tokens, the first ones included / time from the prompts' arrival to the last token",
}


@dataclass(frozen=True)
class Shape:
    """What one pass computes: `batch` prompts of `prompt_len` tokens behind `depth` positions of random K and V, and `gen_len`
    tokens for each."""

    batch: int
    prompt_len: int
    gen_len: int
    depth: int

    def context(self) -> float:
        """Mean number of positions that a decode step of this shape reads for each stream."""
        return self.depth + self.prompt_len + self.gen_len / 2


class Contender(Protocol):
    """Someone who turns prompts into tokens, called in the order below; `ops` and `graph` say how, as outputs call it."""

    ops: str
    graph: str

    def prepare(self, shape: Shape, seed: int) -> None:
        """Make the prompts, fill the cache to the shape's depth, wait for the device. Not timed."""

    def submit(self) -> None:
        """Hand the prompts over. The clock runs."""

    def advance(self) -> list[int]:
        """Compute one step and bring its tokens to the host: the stream, 0 to batch - 1, of each token. No stream ends before
        it has gen_len tokens. Raises RequestError if one ended with an error.
        """

    def finish(self) -> None:
        """Drop what still runs. Not timed."""


@dataclass(frozen=True)
class Pass:
    """Raw times of one pass, in seconds.

    Attributes:
        first: of each stream, arrival to first token.
        gaps: decode steps after the last stream's first token, one gap a step.
        decode_tokens: tokens that arrived in those gaps, over all streams.
        tokens: all tokens of the pass; end_to_end: arrival to the last of them.
    """

    shape: Shape
    first: tuple[float, ...]
    gaps: tuple[float, ...]
    decode_tokens: int
    tokens: int
    end_to_end: float

    @property
    def tpot(self) -> float:
        """Seconds between two tokens of one stream."""
        return self.shape.batch / self.decode_rate

    @property
    def decode_rate(self) -> float:
        """Tokens a second over all streams, prefill outside."""
        return self.decode_tokens / sum(self.gaps)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.shape.batch * self.shape.prompt_len / max(self.first)

    @property
    def end_to_end_rate(self) -> float:
        """Tokens a second over all streams, prefill inside."""
        return self.tokens / self.end_to_end


def measure(contender: Contender, shape: Shape, seed: int, clock: Callable[[], float] = time.perf_counter) -> Pass:
    """Time one pass: the clock is read when a step's tokens are on the host, as a user sees them.

    Raises:
        RequestError: a stream ended with an error; the contender is ready for the next pass.
    """
    contender.prepare(shape, seed)
    gc.collect()
    first: dict[int, float] = {}
    counts = [0] * shape.batch
    gaps: list[float] = []
    before = 0  # tokens told up to the last stream's first
    try:
        start = last = clock()
        contender.submit()
        while min(counts) < shape.gen_len:
            streams = contender.advance()
            now = clock()
            if not streams:
                continue
            if len(first) == shape.batch:
                gaps.append(now - last)
            last = now
            for stream in streams:
                first.setdefault(stream, now - start)
                counts[stream] += 1
            if not gaps:
                before = sum(counts)
        if not gaps:
            raise RequestError(f"no decode step to time: gen_len {shape.gen_len} is over with the prefill; give a larger one")
        ordered = tuple(first[stream] for stream in range(shape.batch))
        return Pass(shape, ordered, tuple(gaps), sum(counts) - before, sum(counts), last - start)
    finally:
        contender.finish()


@dataclass
class Cell:
    """One line of the matrix and what was measured in it.

    Attributes:
        step_bytes: what a decode step must read at the least: weight_bytes once, K and V of each stream's positions.
        apart: who plays under the profiler where the contender's kernels overlap; None: the contender.
        weights: the format of the projections that it reads.
        passes: the counted passes; failures: a sentence for each pass that failed, the warm-up's too.
    """

    contender: Contender
    shape: Shape
    step_bytes: int
    weight_bytes: int
    apart: Contender | None = None
    passes: list[Pass] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    weights: str = "bf16"

    def __str__(self) -> str:
        return cell_name(self.contender.ops, self.contender.graph, self.weights, self.shape.batch, self.shape.depth)


def cell_name(ops: str, graph: str, weights: str, batch: int, depth: int) -> str:
    """What a cell is called in words and results; formats of weights have names of their own."""
    return f"{ops}/{graph}{'' if weights == 'bf16' else f' {weights}'} batch {batch} depth {depth}"


def play(cells: Sequence[Cell], reps: int, warmup: int, say: Callable[[str], None]) -> bool:
    """Play every cell `warmup` times uncounted and `reps` times counted, all at full length, taking turns: rep by rep, not cell
    by cell, so that a drifting clock is shared. A pass that fails is noted in its cell.

    Returns:
        False if the device failed: nothing further can run.
    """
    gc.collect()
    gc.freeze()  # as the server does: no collection walks everything that was imported while tokens are timed
    try:
        return _play(cells, reps, warmup, say)
    finally:
        gc.unfreeze()


def _play(cells: Sequence[Cell], reps: int, warmup: int, say: Callable[[str], None]) -> bool:
    for turn in range(warmup + reps):
        counted = turn >= warmup
        label = f"rep {turn - warmup + 1}/{reps}" if counted else f"warm-up {turn + 1}/{warmup}"
        for number, cell in enumerate(cells):
            try:
                # Other prompts in every turn: none may be answered from an earlier one's cache.
                done = measure(cell.contender, cell.shape, seed=turn * len(cells) + number)
            except (RequestError, torch.OutOfMemoryError, DeviceError, torch.AcceleratorError) as error:
                cell.failures.append(f"{label}: {error}")
                say(f"{label}, {cell}: failed: {error}")
                if isinstance(error, RequestError | torch.OutOfMemoryError):
                    continue
                return False
            say(f"{label}, {cell}: {done.decode_rate:.1f} tok/s decode, first token {1e3 * max(done.first):.1f} ms")
            if counted:
                cell.passes.append(done)
    return True
