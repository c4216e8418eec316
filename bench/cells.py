"""Owns the cells of the latency matrix: played in turns, profiled, and held against the floor. Does not own the clock (timing),
the contenders (engine_run, hf_run) or the tables (report).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import profiled
from bench.timing import Contender, Pass, Shape, measure
from runtime.errors import DeviceError, QuartetError, RequestError

PROFILED_STEPS = 8


@dataclass
class Cell:
    """One line of the matrix and what was measured in it.

    Attributes:
        ops, graph: of the contender.
        step_bytes: what a decode step must read at the least: weights once, K and V of each stream's positions.
        resident_bytes: what others hold on the device meanwhile, not counted into peak_bytes.
        passes: the counted passes; failures: a sentence for each pass that failed, the warm-up's too.
        counts: what the profiler saw; profile_note: why it saw nothing.
        peak_bytes: most device memory of any counted pass; 0 on a CPU.
    """

    contender: Contender
    shape: Shape
    step_bytes: int
    weight_bytes: int
    resident_bytes: int = 0
    passes: list[Pass] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    counts: profiled.Counts | None = None
    profile_note: str | None = None
    peak_bytes: int = 0

    @property
    def ops(self) -> str:
        return self.contender.ops

    @property
    def graph(self) -> str:
        return self.contender.graph

    def __str__(self) -> str:
        return f"{self.ops}/{self.graph} batch {self.shape.batch} depth {self.shape.depth}"


def play(cells: Sequence[Cell], reps: int, warmup: int, device: torch.device, say: Callable[[str], None]) -> bool:
    """Play every cell `warmup` times uncounted and `reps` times counted, all at full length, taking turns: rep by rep, not cell
    by cell, so that a drifting clock is shared. A pass that fails is noted in its cell.

    Returns:
        False if the device failed: nothing further can run.
    """
    for turn in range(warmup + reps):
        counted = turn >= warmup
        label = f"rep {turn - warmup + 1}/{reps}" if counted else f"warm-up {turn + 1}/{warmup}"
        for number, cell in enumerate(cells):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                # Other prompts in every turn: none may be answered from an earlier one's cache.
                done = measure(cell.contender, cell.shape, seed=turn * len(cells) + number)
            except (RequestError, torch.OutOfMemoryError) as error:
                cell.failures.append(f"{label}: {error}")
                say(f"{label}, {cell}: failed: {error}")
                continue
            except (DeviceError, torch.AcceleratorError) as error:
                cell.failures.append(f"{label}: {error}")
                say(f"{label}, {cell}: the device failed, nothing further can run: {error}")
                return False
            if counted:
                cell.passes.append(done)
            if counted and device.type == "cuda":
                cell.peak_bytes = max(cell.peak_bytes, torch.cuda.max_memory_allocated(device) - cell.resident_bytes)
            say(f"{label}, {cell}: {done.decode_rate:.1f} tok/s decode, first token {1e3 * max(done.first):.1f} ms")
    return True


def profile(cells: Sequence[Cell], layers: int, device: torch.device, trace: Path | None, say: Callable[[str], None]) -> None:
    """Count kernels and launches of a few decode steps of each cell, in a pass of its own that is not timed. Traces are kept in
    `trace`, with the cell in the name when there are several."""
    cuda = device.type == "cuda"
    for cell in cells:
        if cell.failures or not (cuda or trace):
            continue
        path = trace
        if trace is not None and len(cells) > 1:
            name, dot, suffix = trace.name.partition(".")
            path = trace.with_name(f"{name}-{cell.ops}-{cell.graph}-b{cell.shape.batch}-d{cell.shape.depth}{dot}{suffix}")
        say(f"profile, {cell}")
        try:
            cell.counts = _profile_cell(cell, layers, cuda, path)
        except (ValueError, KeyError, OSError, RuntimeError, QuartetError) as error:  # what was timed must outlive this
            cell.profile_note = repr(error)
            say(f"{cell} is not profiled: {error!r}")


def _profile_cell(cell: Cell, layers: int, cuda: bool, trace: Path | None) -> profiled.Counts | None:
    """Bring the whole batch into its decode steps, then record some of them."""
    contender, shape = cell.contender, cell.shape
    steps = min(PROFILED_STEPS, shape.gen_len - 5)
    if steps < 1:
        cell.profile_note = f"gen_len {shape.gen_len} is too short to profile; 6 or more are needed"
        return None

    def advance() -> None:
        for _ in range(steps):
            contender.advance()

    try:
        contender.prepare(shape, seed=-1)
        contender.submit()
        started: set[int] = set()
        while len(started) < shape.batch:
            started.update(contender.advance())
        return profiled.count(profiled.record(advance, trace, cuda), steps, layers)
    finally:
        contender.finish()


def above_ceiling(cell: Cell, floor_ms: float) -> str | None:
    """A warning if any pass was faster than its bytes can be read."""
    fastest = min((1e3 * p.tpot for p in cell.passes), default=floor_ms)
    if fastest >= floor_ms:
        return None
    return (
        f"{cell}: a pass took {fastest:.4f} ms a token, above the floor's rate: reading its bytes takes {floor_ms:.4f} ms; "
        "either they fit in a cache or the clock is wrong"
    )
