"""Owns what others see of the device: torch's profiler the kernels, launches and busy time of a cell's decode steps, and Nsight
Compute, where it is installed and the driver permits it, the DRAM bytes and L2 sectors of each kernel. Times nothing itself.

Counts are read from the raw events of the exported trace: aggregates such as `key_averages` miss kernels replayed by a graph.
"""

import csv
import gzip
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from bench.session import playing
from bench.timing import Cell
from runtime.errors import QuartetError

METRICS = {"dram_read": "dram__bytes_read.sum", "dram_written": "dram__bytes_write.sum", "l2_sectors": "lts__t_sectors.sum"}
FORBIDDEN = (
    "the driver lets only administrators read counters (ERR_NVGPUCTRPERM); load its module with "
    "NVreg_RestrictProfilingToAdminUsers=0, or run as an administrator with CAP_SYS_ADMIN, and ask again"
)
STEPS = 8


@dataclass(frozen=True)
class Counts:
    """Per decode step, from a profiled pass of its own.

    Attributes:
        steps: steps profiled.
        kernels: kernels a step; copies: memory copies and fills a step.
        launches: host calls a step that set the device to work: several kernels that share one call are a graph's.
        kernels_per_layer: see `per_layer`.
        busy_ms: time a step in which at least one kernel or copy ran.
        kernel_names: how often each comes in a step.
    """

    steps: int
    kernels: float
    copies: float
    launches: float
    kernels_per_layer: int | None
    busy_ms: float
    kernel_names: dict[str, int]


Seen = Counts | str | None
"""A cell's counts, or why there are none; None on a CPU and for a cell that has failed before."""


def profile(
    cells: Sequence[Cell], layers: int, device: torch.device, trace: Path | None, say: Callable[[str], None]
) -> list[Seen]:
    """Profile a few decode steps of each cell, in a pass of its own that is not timed. Traces are kept in `trace`, with the
    cell in the name when there are several."""
    found: list[Seen] = []
    for cell in cells:
        path = trace
        if trace is not None and len(cells) > 1:
            name, dot, suffix = trace.name.partition(".")
            path = trace.with_name(f"{name}-{re.sub(r'[^a-z0-9]+', '-', str(cell))}{dot}{suffix}")
        counts: Seen = None
        if not cell.failures and (device.type == "cuda" or trace is not None):
            say(f"profile, {cell}")
            try:
                counts = _profile_cell(cell, layers, device.type == "cuda", path)
            except (ValueError, KeyError, OSError, RuntimeError, QuartetError) as error:  # what was timed must outlive this
                counts = repr(error)
        found.append(counts)
    return found


def _profile_cell(cell: Cell, layers: int, cuda: bool, trace: Path | None) -> Seen:
    """Bring the whole batch into its decode steps, then record some of them."""
    contender, shape = cell.apart or cell.contender, cell.shape
    steps = min(STEPS, shape.gen_len - 5)
    if steps < 1:
        return f"gen_len {shape.gen_len} is too short to profile; 6 or more are needed"

    try:
        contender.prepare(shape, seed=-1)
        contender.submit()
        started: set[int] = set()
        while len(started) < shape.batch:
            started.update(contender.advance())
        return count(record(lambda: [contender.advance() for _ in range(steps)], trace, cuda), steps, layers)
    finally:
        contender.finish()


def record(run: Callable[[], object], trace: Path | None, cuda: bool) -> list[dict[str, Any]]:
    """Run under the profiler; the raw trace events. `trace` (.json or .json.gz) is kept when given."""
    activities = [ProfilerActivity.CUDA] if cuda else []
    if trace is not None or not cuda:
        activities.append(ProfilerActivity.CPU)
    if cuda:
        _set_up()
        torch.cuda.synchronize()  # what is in the air belongs to no step of ours
    with torch_profile(activities=activities) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace if trace is not None else Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        data = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


@cache
def _set_up() -> None:
    """The first use sets the profiler up, and may miss events."""
    with torch_profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()


def count(events: list[dict[str, Any]], steps: int, layers: int) -> Counts | None:
    """Read the counts of `steps` equal decode steps off trace events; None if no kernel is among them (a CPU run)."""
    device = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: float(e["ts"]))
    kernels = [e for e in device if e["cat"] == "kernel"]
    if not kernels:
        return None
    names = Counter(str(e["name"]) for e in kernels[: len(kernels) // steps])
    return Counts(
        steps=steps,
        kernels=len(kernels) / steps,
        copies=(len(device) - len(kernels)) / steps,
        launches=len({e["args"]["correlation"] for e in device}) / steps,
        kernels_per_layer=per_layer(names, layers),
        busy_ms=busy_us([(float(e["ts"]), float(e["dur"])) for e in device]) / steps / 1e3,
        kernel_names=dict(names),
    )


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of (start, duration) intervals, sorted by start."""
    total, end = 0.0, float("-inf")
    for start, duration in intervals:
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total


def per_layer(names: Counter[str], layers: int) -> int | None:
    """How many of a step's kernels belong to one of its `layers`: those that come at least once for each; None if none does."""
    return sum(times // layers for times in names.values()) or None if layers > 1 else None


@dataclass(frozen=True)
class Counted:
    """What one kernel moved: bytes to and from DRAM, 32-byte sectors through L2."""

    kernel: str
    dram_read: float
    dram_written: float
    l2_sectors: float


def counted(code: str, launches: int, seconds: float = 240) -> list[Counted] | str:
    """Counters of the first `launches` kernels inside `watched` of a Python program; or why there are none, in words.

    Caches are emptied before each kernel (Nsight's default), so intermediates that live in L2 count as DRAM reads here.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu (Nsight Compute) is not installed, so nothing is counted; it comes with the CUDA toolkit"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        flags = ["--clock-control", "none", "--profile-from-start", "off"]
        flags += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        chosen = ["--metrics", ",".join(METRICS.values()), "--launch-count", str(launches)]
        try:
            done = subprocess.run([ncu, *flags, *chosen, *playing(code)], capture_output=True, text=True, timeout=seconds)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"ncu did not end well: {error}"
        told = log.read_text() if log.exists() else ""
        said = told + done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        return FORBIDDEN
    found = parse(told)
    return found or f"ncu counted nothing (exit code {done.returncode}): {said.strip()[-300:]}"


def parse(told: str) -> list[Counted]:
    """The kernels of ncu's raw CSV page in base units; lines that start with == are its own remarks."""
    lines = [line for line in told.splitlines() if line.startswith('"')]
    found = []
    for row in csv.DictReader(lines):
        figures = {name: row.get(metric, "").replace(",", "") for name, metric in METRICS.items()}
        if row.get("ID") and all(figures.values()):  # the line below the head holds units, and has no ID
            found.append(Counted(row["Kernel Name"], **{name: float(word) for name, word in figures.items()}))
    return found


def watched(play: Callable[[], object]) -> None:
    """Play something once with the counters on."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    play()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
