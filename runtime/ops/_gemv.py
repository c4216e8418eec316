"""Owns what the GEMV kernels share: the two halves of programmatic dependent launch, the rest of a row, and launch options.

Does not own any kernel. Letters here: IN and n are a weight's in and out features (`[n, IN]`), TOKENS the padded batch.
"""

from typing import Any

from runtime.ops._triton import tl, triton

TOKENS = 16
"""Batches of 2 to 16 are padded to this: the narrowest token side of `tl.dot`."""


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
def inverse_rms(x_ptr, b, batch, eps, IN: tl.constexpr, K_SLICE: tl.constexpr, TOKENS: tl.constexpr):
    """1 / rms of each row of x `[batch, IN]`, `[TOKENS]`: a pass of its own, for dtypes in which x * norm could overflow."""
    k = tl.arange(0, K_SLICE)
    squares = tl.zeros((TOKENS, K_SLICE), tl.float32)
    for s in range(0, IN, K_SLICE):
        mask = (b[:, None] < batch) & (s + k[None, :] < IN)
        x = tl.load(x_ptr + b[:, None] * IN + s + k[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / IN + eps)


@triton.jit
def token_slice(x_ptr, norm_ptr, factor, b, k, mask, NORM: tl.constexpr, IN: tl.constexpr):
    """A slice of the activations `[TOKENS, K_SLICE]` float32, as loaded and with norm and factor `[TOKENS]` multiplied in."""
    x = tl.load(x_ptr + b[:, None] * IN + k[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        return x, x * tl.load(norm_ptr + k).to(tl.float32)[None, :] * factor[:, None]
    return x, x


def launch_options(warps: int, stages: int, pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch. FP fusion is named because its default changes between Triton's versions."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return options | ({"launch_pdl": True} if pdl else {})


def dot_dtype(dtype: Any, interpreted: bool) -> Any:
    """The type `tl.dot` multiplies in: the tensors' own, but float32 in Triton's interpreter, where bfloat16 dots are wrong."""
    name = "float32" if interpreted else str(dtype).removeprefix("torch.")
    return {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}[name]
