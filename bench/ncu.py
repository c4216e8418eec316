"""Owns hardware counters: DRAM bytes and L2 sectors of each kernel, counted by Nsight Compute in a process of its own where it
is installed and the driver permits it. Does not own what is run under it.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_sectors": "lts__t_sectors.sum",
}
FORBIDDEN = (
    "the driver lets only administrators read counters (ERR_NVGPUCTRPERM); load its module with "
    "NVreg_RestrictProfilingToAdminUsers=0, or run as an administrator with CAP_SYS_ADMIN, and ask again"
)


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
        flags = [
            "--clock-control",
            "none",
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
            "--log-file",
            str(log),
            "--profile-from-start",
            "off",
        ]
        chosen = ["--metrics", ",".join(METRICS.values()), "--launch-count", str(launches)]
        try:
            done = subprocess.run(
                [ncu, *flags, *chosen, sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds
            )
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
