"""Owns the Triton kernel that reads memory and nothing else: the best rate a simple kernel reaches is the ceiling of decoding.

Imported on CUDA only. Does not own what a step must read (models.ModelConfig).
"""

import statistics

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ITERATIONS, STAGES, WARPS = 4096, 16, 3, 4
"""4.61 TB/s of the datasheet's 4.8 on one H200 (torch 2.11, triton 3.6, 2026-11-29), the best of those tried."""


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK * ITERATIONS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        total += tl.load(x_ptr + offsets + i * BLOCK).to(tl.float32)
    tl.store(out_ptr + program, tl.sum(total, axis=0))


def read_gbps(buffer: Tensor, repeats: int = 20) -> float:
    """Median rate in GB/s of reading `buffer`, a flat CUDA tensor much larger than the L2 cache, timed with CUDA events."""
    programs = buffer.numel() // (BLOCK * ITERATIONS)
    out = torch.empty(programs, dtype=torch.float32, device=buffer.device)
    times_ms = []
    for i in range(3 + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        _read_kernel[(programs,)](buffer, out, BLOCK=BLOCK, ITERATIONS=ITERATIONS, STAGES=STAGES, num_warps=WARPS)
        end.record()
        end.synchronize()
        if i >= 3:  # the first calls compile and warm up
            times_ms.append(start.elapsed_time(end))
    return float(programs * BLOCK * ITERATIONS * buffer.itemsize / statistics.median(times_ms) / 1e6)
