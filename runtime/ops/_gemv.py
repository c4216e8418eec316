"""Owns what the GEMV kernels share: the two halves of programmatic dependent launch, the rest of a row, and launch options.

Does not own any kernel. Letters here: IN and n are a weight's in and out features (`[n, IN]`), TOKENS the padded batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.ops._triton import tl, triton

TOKENS = 16
"""Batches of 2 to 16 are padded to this: the narrowest token side of `tl.dot`."""


STAGGER = tl.constexpr(5)
"""Slices by which a block of a batch starts further on than the block before it: blocks in step would ask for the same columns
of all rows at once, and meet in the same memory channels."""


@dataclass(frozen=True)
class Scaled:
    """A batch's residual stream on its way into a norm, made by the launch that made x: x times the norm's weight in x's dtype
    `[16, C]`, and partial sums of x² `[parts, 16]` float32. Rows from the batch on mean nothing.

    `scale` is multiplied in as well: in float16, x times a weight could overflow where the norm of it does not.
    """

    x: Tensor
    squares: Tensor
    scale: float

    @classmethod
    def make(cls, width: int, dtype: torch.dtype, device: torch.device, parts: int) -> "Scaled":
        """For x of `width` features, written in `parts` blocks."""
        return cls(
            torch.zeros((TOKENS, width), dtype=dtype, device=device),
            torch.zeros((triton.next_power_of_2(parts), TOKENS), dtype=torch.float32, device=device),
            2.0**-6 if dtype == torch.float16 else 1.0,
        )

    @property
    def constants(self) -> dict[str, Any]:
        return {"PARTS": len(self.squares), "SCALE": self.scale}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel's blocks may be scheduled from here on; they wait for this whole kernel before they read its output."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Everything earlier kernels wrote may be read from here on. Every block comes here exactly once, idle or not."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def rest_dot(total, weight_ptr, r, x_ptr, norm_ptr, NORM: tl.constexpr, IN: tl.constexpr, DONE: tl.constexpr):
    """total `[ROWS]` + the dot products over in features DONE.. of IN, in powers of two, so that no weight load is masked."""
    for i in tl.static_range(16):
        if (IN - DONE) & (1 << (15 - i)):
            k = tl.arange(0, 1 << (15 - i)) + (DONE + ((IN - DONE) & ~((2 << (15 - i)) - 1)))
            w = tl.load(weight_ptr + r[:, None] * IN + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + k).to(tl.float32)
            if NORM:
                x *= tl.load(norm_ptr + k).to(tl.float32)
            total += tl.sum(w.to(tl.float32) * x[None, :], 1)
    return total


@triton.jit
def rest_squares(total, x_ptr, IN: tl.constexpr, DONE: tl.constexpr):
    """total (a scalar) + the sum of x² over in features DONE.. of IN."""
    for i in tl.static_range(16):
        if (IN - DONE) & (1 << (15 - i)):
            k = tl.arange(0, 1 << (15 - i)) + (DONE + ((IN - DONE) & ~((2 << (15 - i)) - 1)))
            x = tl.load(x_ptr + k).to(tl.float32)
            total += tl.sum(x * x, 0)
    return total


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Ask for the cache lines of these pointers to come to L2; for weights, before the wait."""
    if PDL:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_rows(weight_ptr, r, start, AHEAD: tl.constexpr, IN: tl.constexpr, PDL: tl.constexpr):
    """Prefetch in features start.. of rows r, AHEAD lines of 128 bytes a row."""
    if AHEAD > 0:
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        k = tl.minimum(start + tl.arange(0, AHEAD) * LINE, IN - 1)
        prefetch(weight_ptr + r[:, None] * IN + k[None, :], PDL)


@triton.jit
def tokens_dot(
    x_ptr, weight_ptr, r, b, live, start, slices, turn, end, IN: tl.constexpr, K_SLICE: tl.constexpr, DOT_DTYPE: tl.constexpr
):
    """Rows r of the weights with tokens b of x `[batch, IN]` over `slices` slices of in features from `start` on, the turn-th
    first, and over what is left up to `end` behind the last whole slice of IN: `[ROWS, TOKENS]` float32."""
    k = tl.arange(0, K_SLICE)
    acc = tl.zeros((r.shape[0], b.shape[0]), tl.float32)
    weight_ptr += r[:, None] * IN + k[None, :]
    x_ptr += b[:, None] * IN + k[None, :]
    for i in range(slices):
        s = start + (i + turn) % slices * K_SLICE
        w = tl.load(weight_ptr + s)
        x = tl.load(x_ptr + s, mask=live[:, None], other=0.0)
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(x.to(DOT_DTYPE)), acc, input_precision="ieee")
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    if DONE < IN:
        inside = DONE + k < end
        w = tl.load(weight_ptr + DONE, mask=inside[None, :], other=0.0)
        x = tl.load(x_ptr + DONE, mask=live[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(x.to(DOT_DTYPE)), acc, input_precision="ieee")
    return acc


@triton.jit
def load_squares(squares_ptr, b, PARTS: tl.constexpr):
    """Partial sums `[PARTS, TOKENS]`; PARTS is a power of two, unused parts are zero."""
    return tl.load(squares_ptr + tl.arange(0, PARTS)[:, None] * b.shape[0] + b[None, :])


@triton.jit
def inverse_rms(squares, eps, IN: tl.constexpr, SCALE: tl.constexpr):
    """1 / rms of each token `[TOKENS]`, from partial sums of its squares `[parts, TOKENS]`; takes the `SCALE` off as well."""
    return tl.rsqrt(tl.sum(squares, 0) / IN + eps) / SCALE


def launch_options(warps: int, stages: int, pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch. FP fusion is named because its default changes between Triton's versions."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return options | ({"launch_pdl": True} if pdl else {})


def dot_dtype(dtype: Any, interpreted: bool) -> Any:
    """The type `tl.dot` multiplies in: the tensors' own, but float32 in Triton's interpreter, where bfloat16 dots are wrong."""
    name = "float32" if interpreted else str(dtype).removeprefix("torch.")
    return {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}[name]
