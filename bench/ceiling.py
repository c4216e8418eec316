"""Owns the memory bus: what it reads at best, measured now, and what the datasheet promises. Does not own a step's bytes.

Decoding at small batches reads every weight for each step, so bytes / read ceiling is the least time a step can take.
"""

import time
from dataclasses import dataclass

import torch

from runtime.device import datasheet_gbps, free_bytes

CUDA_BYTES, CPU_BYTES = 4 << 30, 1 << 28


@dataclass(frozen=True)
class Ceiling:
    """What the memory bus gives.

    Attributes:
        measured_gbps: read rate reached just now; how: by what.
        datasheet_gbps: None for a device whose datasheet is not in the table.
    """

    measured_gbps: float
    how: str
    datasheet_gbps: float | None

    def floor_ms(self, step_bytes: float) -> float:
        """Least time to read this many bytes."""
        return step_bytes / self.measured_gbps / 1e6

    def __str__(self) -> str:
        datasheet = "not known" if self.datasheet_gbps is None else f"{self.datasheet_gbps:,.0f} GB/s"
        return f"read ceiling {self.measured_gbps:,.1f} GB/s ({self.how}, measured now); datasheet {datasheet}"


def measure_ceiling(device: torch.device) -> Ceiling:
    """Measure the read rate of the device's memory; about a second, and up to 4.3 GB that are given back."""
    if device.type == "cuda":
        return _measure_cuda(device)
    buffer = torch.ones(CPU_BYTES // 4)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    # The best one: other processes share a CPU's bus, and a ceiling is what it can do.
    gbps = buffer.nbytes / min(times) / 1e9
    return Ceiling(gbps, f"torch.sum over {buffer.nbytes / 1e9:.2f} GB, {torch.get_num_threads()} threads, best of 8", None)


def _measure_cuda(device: torch.device) -> Ceiling:
    from bench.read_kernel import read_gbps

    size = min(CUDA_BYTES, free_bytes(device) // 4)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    gbps = read_gbps(buffer)
    how = f"Triton read kernel over {buffer.nbytes / 1e9:.2f} GB"
    del buffer
    torch.cuda.empty_cache()
    return Ceiling(gbps, how, datasheet_gbps(torch.cuda.get_device_name(device)))
