"""Owns SiLU(gate) * up, one launch. Does not own the projections on either side."""

import torch.nn.functional as F
from torch import Tensor

from runtime.ops._triton import tl, triton


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    gate = tl.load(gate_ptr + i, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + i, mask=mask).to(tl.float32)
    tl.store(out_ptr + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up `[B, F]` contiguous -> silu(gate) * up `[B, F]`, float32 arithmetic, rounded once. Written over gate.

    Bytes: gate and up read, the product written.
    """
    _silu_mul_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, gate, gate.numel(), BLOCK=1024)
    return gate


def silu_mul_torch(gate: Tensor, up: Tensor) -> Tensor:
    """The torch twin, also prefill's."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)
