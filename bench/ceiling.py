"""Owns the memory bus: what it reads at best, measured now, and what the datasheet promises. Does not own a step's bytes.

Decoding at small batches reads every weight for each step, so bytes / read ceiling is the least time a step can take.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.steps import back_to_back_us, median
from runtime.device import datasheet_gbps, free_bytes
from runtime.ops._triton import tl, triton

CUDA_BYTES, CPU_BYTES = 4 << 30, 1 << 28
BLOCK, ITERATIONS, STAGES, WARPS = 4096, 16, 3, 4
"""4.61 TB/s of the datasheet's 4.8 on one H200 (torch 2.11, triton 3.6, 2026-11-29), the best of those tried."""


@dataclass(frozen=True)
class Ceiling:
    """What the memory bus gives.

    Attributes:
        measured_gbps: read rate; how: reached by what, and when.
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
        return f"read ceiling {self.measured_gbps:,.1f} GB/s ({self.how}); datasheet {datasheet}"


def measure_ceiling(device: torch.device) -> Ceiling:
    """Measure the read rate of the device's memory; about a second, and up to 4.3 GB that are given back."""
    if device.type == "cuda":
        buffer = torch.ones(min(CUDA_BYTES, free_bytes(device) // 4) // 4, device=device)
        gbps, how = _cuda_gbps(buffer), f"Triton read kernel over {buffer.nbytes / 1e9:.2f} GB, measured now"
        del buffer
        torch.cuda.empty_cache()
        return Ceiling(gbps, how, datasheet_gbps(torch.cuda.get_device_name(device)))
    buffer = torch.ones(CPU_BYTES // 4)
    least_us = min(back_to_back_us(buffer.sum, 1, device) for _ in range(8))
    # The best one: other processes share a CPU's bus, and a ceiling is what it can do.
    how = f"torch.sum over {buffer.nbytes / 1e9:.2f} GB, {torch.get_num_threads()} threads, best of 8, measured now"
    return Ceiling(buffer.nbytes / least_us / 1e3, how, None)


def _cuda_gbps(buffer: Tensor, repeats: int = 20) -> float:
    """Median rate of reading `buffer`, flat and much larger than the L2 cache."""
    programs = buffer.numel() // (BLOCK * ITERATIONS)
    out = torch.empty(programs, dtype=torch.float32, device=buffer.device)

    def read() -> None:
        read_kernel[(programs,)](buffer, out, BLOCK=BLOCK, ITERATIONS=ITERATIONS, STAGES=STAGES, num_warps=WARPS)

    us = [back_to_back_us(read, 1, buffer.device) for _ in range(3 + repeats)][3:]  # the first calls compile and warm up
    return programs * BLOCK * ITERATIONS * buffer.itemsize / median(us) / 1e3


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, STAGES: tl.constexpr):
    """Each program reads BLOCK * ITERATIONS values and stores their sum."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK * ITERATIONS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        total += tl.load(x_ptr + offsets + i * BLOCK).to(tl.float32)
    tl.store(out_ptr + program, tl.sum(total, axis=0))
