"""Owns what the GEMV kernels share: the two halves of programmatic dependent launch, the walk over rows of weights
(`stream_rows` for one token, `tokens_dot` for a batch), and launch options.

Does not own any kernel. Letters here: IN and n are a weight's in and out features (`[n, IN]`), TOKENS the padded batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.ops import Linear
from runtime.ops._triton import tl, triton
from runtime.ops.configs import Tile, splits_fit
from runtime.ops.fp8 import Fp8

TOKENS = 16
"""Batches of 2 to 16 are padded to this: the narrowest token side of `tl.dot`."""


STAGGER = tl.constexpr(5)
"""Slices by which a block of a batch starts further on than the block before it: blocks in step would ask for the same columns
of all rows at once, and meet in the same memory channels."""


RAISED = {torch.bfloat16: 2.0**100}
"""By how much one token is scaled for weights of 8 and 4 bits: as operands those are next to the type's smallest numbers."""


@dataclass(frozen=True)
class Scaled:
    """The residual stream on its way into a norm, made by the launch that made x: x times the norm's weight in x's dtype
    `[16, C]`, and partial sums of x² `[parts, 16]` float32; one row's `[1, C]` and `[parts, 1]`. Rows from the batch on mean
    nothing.

    `scale` is multiplied in as well: in float16, x times a weight could overflow where the norm of it does not.
    """

    x: Tensor
    squares: Tensor
    scale: float

    @classmethod
    def make(
        cls, width: int, dtype: torch.dtype, device: torch.device, parts: int, tokens: int = TOKENS, raised: bool = False
    ) -> "Scaled":
        """For x of `width` features, written in `parts` blocks; `tokens`: 16 for any batch, or 1; `raised`: by `RAISED`, here
        and not by each block that reads x."""
        return cls(
            torch.zeros((tokens, width), dtype=dtype, device=device),
            torch.zeros((triton.next_power_of_2(parts), tokens), dtype=torch.float32, device=device),
            2.0**-6 if dtype == torch.float16 else RAISED.get(dtype, 1.0) if raised else 1.0,
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
    if PDL:  # Triton 3.9 pipelines no loop that holds its own `gdc_wait`
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_before(WANTED: tl.constexpr):
    """Loads above stay above, loads below stay below: ptxas would put off those of few registers to where they are used, and
    ask early for others."""
    if WANTED:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_features(ptr, first, K: tl.constexpr):
    """K numbers of a vector over in features, from place `first` on, as float32."""
    return tl.load(ptr + first + tl.arange(0, K)).to(tl.float32)


@triton.jit
def load_rows(ptr, r, WANTED: tl.constexpr):
    """What belongs to rows r, as it is stored; 0 where it is not wanted. For before the wait, so that no block ends with a load
    from memory, and to be converted where it is used, since a conversion waits for what it converts."""
    values = 0.0
    if WANTED:
        values = tl.load(ptr + r)
    return values


@triton.jit
def first_slices(weight_ptr, r, norm_ptr, IN: tl.constexpr, K_SLICE: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the first AHEAD slices of rows r and of the norm's weight (norm_ptr None: there is none), for `stream_rows`."""
    tile = weight_ptr + r[:, None] * IN + tl.arange(0, K_SLICE)[None, :]
    w = ()
    g = ()
    for i in tl.static_range(AHEAD):
        if i < IN // K_SLICE:
            w = w + (tl.load(tile + i * K_SLICE, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
            if norm_ptr is not None:
                g = g + (load_features(norm_ptr, i * K_SLICE, K_SLICE),)  # type: ignore[assignment]  # noqa: RUF005
    return w, g


@triton.jit
def stream_rows(
    w,
    g,
    weight_ptr,
    r,
    x_ptr,
    norm_ptr,
    IN: tl.constexpr,
    K_SLICE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Rows r of the weights times x `[IN]` (times the norm's weight, unless norm_ptr is None): `[ROWS]` float32, and the sum of
    x². w, g: from `first_slices`. With each slice that is used one more is asked for, so that a thread
    always has AHEAD on their way. No weight load is masked: what is left behind the last whole slice comes in powers of two.
    """
    SLICES: tl.constexpr = IN // K_SLICE
    tile = weight_ptr + r[:, None] * IN + tl.arange(0, K_SLICE)[None, :]
    acc = tl.zeros((r.shape[0], K_SLICE), tl.float32)
    squares = tl.zeros((K_SLICE,), tl.float32)
    for i in tl.static_range(SLICES):
        x = load_features(x_ptr, i * K_SLICE, K_SLICE)
        if norm_ptr is not None:
            squares += x * x
            x *= g[0]
            g = g[1:]
        acc += w[0].to(tl.float32) * x[None, :]
        w = w[1:]
        if i + AHEAD < SLICES:
            w = w + (tl.load(tile + (i + AHEAD) * K_SLICE, eviction_policy="evict_first"),)  # noqa: RUF005
            if norm_ptr is not None:
                g = g + (load_features(norm_ptr, (i + AHEAD) * K_SLICE, K_SLICE),)  # noqa: RUF005
    total = tl.sum(acc, 1)
    square = tl.sum(squares, 0)
    for i in tl.static_range(16):
        if (IN % K_SLICE) & (1 << (15 - i)):
            total, square = _rest(total, square, weight_ptr, r, x_ptr, norm_ptr, IN, 1 << (15 - i), IN % (2 << (15 - i)))
    return total, square


@triton.jit
def _rest(
    total,
    square,
    weight_ptr,
    r,
    x_ptr,
    norm_ptr,
    IN: tl.constexpr,
    K: tl.constexpr,
    LEFT: tl.constexpr,
):
    """total and square of `stream_rows` with K more places, LEFT before the end of IN."""
    FIRST: tl.constexpr = IN - LEFT
    w = tl.load(weight_ptr + FIRST + r[:, None] * IN + tl.arange(0, K)[None, :], eviction_policy="evict_first")
    x = load_features(x_ptr, FIRST, K)
    if norm_ptr is not None:
        square += tl.sum(x * x, 0)
        x *= load_features(norm_ptr, FIRST, K)
    return total + tl.sum(w.to(tl.float32) * x[None, :], 1), square


@triton.jit
def as_words(ptr):
    """The pointer to the words of 4 bytes that numbers of fewer lie in. Numbers of 2 bytes that pass from one turn of a loop to
    the next are waited for at the end of the turn that asks for them: there ptxas puts halves of registers together."""
    if ptr.dtype.element_ty.primitive_bitwidth < 32:
        ptr = ptr.to(tl.pointer_type(tl.int32))
    return ptr


@triton.jit
def from_words(words, DTYPE: tl.constexpr):
    """Numbers of DTYPE `[TOKENS, K]` from words `[TOKENS, K / 2]`; from numbers those."""
    if words.dtype == tl.int32 and DTYPE.primitive_bitwidth == 16:
        words = tl.reshape(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)), [words.shape[0], 2 * words.shape[1]])
    return words.to(DTYPE, bitcast=True)


@triton.jit
def _load_tokens(x_ptr, s, mask, IN: tl.constexpr, K: tl.constexpr, FP8: tl.constexpr):
    """x `[TOKENS, K]` as it meets rows of weights from place s on, from pointers to tokens `[TOKENS, 1]`, to numbers or words
    that s, IN and K count; FP8: in its order, numbers alone."""
    if FP8:
        at = x_ptr + s // 2 + tl.arange(0, K // 2)[None, :]
        low, high = tl.load(at, mask=mask, other=0.0), tl.load(at + IN // 2, mask=mask, other=0.0)
        x = tl.reshape(tl.join(low, high), [x_ptr.shape[0], K])
    else:
        x = tl.load(x_ptr + s + tl.arange(0, K)[None, :], mask=mask, other=0)
    return x


@triton.jit
def _e4m3_parts(x, scale, INTERPRETED: tl.constexpr):
    """x in bfloat16 times scale, a power of two, as two e4m3 numbers, of 4 significant bits each: the nearest one, and the
    nearest to 16 times what it leaves. They leave nothing, of a scaled x below 2^-6 at most 2^-14."""
    if INTERPRETED:  # which rounds e4m3 wrongly: cut, and kept in float32
        x = x.to(tl.float32) * scale.to(tl.float32)
        high = (x.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
        low = (x - high) * 16.0
    else:
        asm: tl.constexpr = """{
            .reg .b32 a, b, c, d, e, f;
            .reg .b16 p, q;
            mov.b32 c, 0x80008000;
            fma.rn.bf16x2 a, $2, $4, c;
            fma.rn.bf16x2 b, $3, $5, c;
            shl.b32 c, a, 16;
            shl.b32 d, b, 16;
            and.b32 e, a, 0xffff0000;
            and.b32 f, b, 0xffff0000;
            cvt.rn.f16x2.f32 a, e, c;
            cvt.rn.f16x2.f32 b, f, d;
            cvt.rn.satfinite.e4m3x2.f16x2 p, a;
            cvt.rn.satfinite.e4m3x2.f16x2 q, b;
            mov.b32 $0, {p, q};
            cvt.rn.f16x2.e4m3x2 c, p;
            cvt.rn.f16x2.e4m3x2 d, q;
            sub.rn.f16x2 a, a, c;
            sub.rn.f16x2 b, b, d;
            mov.b32 e, 0x4c004c00;
            mul.rn.f16x2 a, a, e;
            mul.rn.f16x2 b, b, e;
            cvt.rn.satfinite.e4m3x2.f16x2 p, a;
            cvt.rn.satfinite.e4m3x2.f16x2 q, b;
            mov.b32 $1, {p, q};
        }"""
        high, low = tl.inline_asm_elementwise(asm, "=&r,=&r,r,r,r,r", [x, scale], (tl.int8, tl.int8), is_pure=True, pack=4)
        high, low = high.to(tl.float8e4nv, bitcast=True), low.to(tl.float8e4nv, bitcast=True)
    return high, low


@triton.jit
def _e4m3_dot(w, x, DOT_DTYPE: tl.constexpr):
    """w `[ROWS, K]` in e4m3 times x `[TOKENS, K]` in bfloat16: `[ROWS, TOKENS]` float32. x becomes two e4m3 numbers, times a
    power of two for each token that brings its largest into [128, 256); their products are columns of their own. Each slice is
    summed from zero: within a product of e4m3 the tensor cores keep some 14 bits of a sum."""
    TOKENS: tl.constexpr = x.shape[0]
    exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23, 8)
    scale = ((261 - exponent) << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)
    high, low = _e4m3_parts(x, scale[:, None], tl.float32 == DOT_DTYPE)
    parts = tl.reshape(tl.permute(tl.join(high, low), (1, 2, 0)), [x.shape[1], 2 * TOKENS])
    sums = tl.dot(w.to(parts.dtype), parts, input_precision="ieee")
    high, low = tl.split(tl.permute(tl.reshape(sums, [w.shape[0], 2, TOKENS]), (0, 2, 1)))
    return (high + low * 0.0625) * ((exponent - 7) << 23).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def _slice_dot(acc, w, x, scales_ptr, r, s, IN: tl.constexpr, GROUP: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """acc + weights w `[ROWS, K]` from place s of their rows on, times x `[TOKENS, K]`; where GROUP in features share a scale,
    times that: places of even and of odd number meet columns of their own then."""
    if scales_ptr is None:
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(x.to(DOT_DTYPE)), acc, input_precision="ieee")
    else:
        half = tl.arange(0, 2)
        if GROUP > 0:
            own = half[:, None] == (tl.arange(0, x.shape[1]) % 2)[None, :]
            x = tl.reshape(tl.where(own[:, None, :], x[None, :, :], 0.0), [2 * x.shape[0], x.shape[1]])
        if x.dtype == tl.bfloat16:
            sums = _e4m3_dot(w, x, DOT_DTYPE)
        else:
            sums = tl.dot(w.to(DOT_DTYPE), tl.trans(x.to(DOT_DTYPE)), input_precision="ieee")
        if GROUP > 0:
            scales = tl.load(scales_ptr + r[:, None] * (IN // GROUP) + ((half * (IN // 2) + s // 2) // GROUP)[None, :])
            sums = tl.sum(tl.reshape(sums, [w.shape[0], 2, acc.shape[1]]) * scales[:, :, None], 1)
        acc += sums
    return acc


@triton.jit
def share_of_slices(split, IN: tl.constexpr, K_SLICE: tl.constexpr, SPLITS: tl.constexpr):
    """Of the in features this split's part, for `tokens_dot`: where it starts, its number of whole slices, and where what is
    left behind a row's last whole slice ends, which the last split takes."""
    SLICES: tl.constexpr = IN // K_SLICE
    SHARE: tl.constexpr = (SLICES + SPLITS - 1) // SPLITS
    if SPLITS == 1:
        start, slices, end = 0, SLICES, IN
    else:
        start = split * SHARE
        slices, end = tl.minimum(SLICES - start, SHARE), tl.where(split == SPLITS - 1, IN, 0)
        start *= K_SLICE
    return start, slices, end


@triton.jit
def in_turn(i, turn, count):
    """The i-th of count, 0 <= i <= count, where the turn-th comes first and behind the last the 0th. turn is below count: a
    remainder for every i would cost a loop 20 to 30 instructions a turn. Of unsigned numbers the smaller one is in range."""
    at = i + turn
    return tl.minimum(at.to(tl.uint32), (at - count).to(tl.uint32)).to(tl.int32)


@triton.jit
def tokens_dot(
    x_ptr,
    squares_ptr,
    weight_ptr,
    scales_ptr,
    r,
    b,
    live,
    start,
    slices,
    turn,
    end,
    eps,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    K_SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows r of the weights with tokens b of x `[batch, IN]` over `slices` slices of a row from `start` on, at least one, the
    turn-th first, and over what is left up to `end` behind its last whole slice: `[ROWS, TOKENS]` float32, times the tokens'
    1 / rms where PARTS parts of their squares are given.

    The wait is in the first turn of the loop: Triton asks for the weights of as many slices as it has stages less one before
    the loop begins, and so before the wait. x must not be among them, so it comes through registers, one slice ahead: as words,
    which made a step with FP8 weights slower.
    """
    FP8: tl.constexpr = scales_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 1 if FP8 or IN % 2 else 32 // DTYPE.primitive_bitwidth
    k = tl.arange(0, K_SLICE)
    scales = load_rows(scales_ptr, r, FP8 and GROUP == 0)
    acc = tl.zeros((r.shape[0], b.shape[0]), tl.float32)
    factor = tl.zeros((b.shape[0],), tl.float32)
    weight_ptr += r[:, None] * IN + k[None, :]
    WORDS: tl.constexpr = K_SLICE // PER
    words_ptr = (as_words(x_ptr) if PER > 1 else x_ptr) + b[:, None] * (IN // PER)
    x_ptr += b[:, None] * IN
    next_x = tl.zeros((b.shape[0], WORDS), words_ptr.dtype.element_ty)
    live = live[:, None]
    turn %= slices
    for i in range(slices):
        s = start + in_turn(i, turn, slices) * K_SLICE
        w = tl.load(weight_ptr + s)
        if i == 0:
            wait_for_previous(PDL)
            next_x = _load_tokens(words_ptr, start // PER + turn * WORDS, live, IN // PER, WORDS, FP8)
            if PARTS > 0:
                factor = inverse_rms(load_squares(squares_ptr, b, PARTS), eps, IN, SCALE)
        x = from_words(next_x, DTYPE)
        s_next = start // PER + in_turn(i + 1, turn, slices) * WORDS
        next_x = _load_tokens(words_ptr, s_next, live, IN // PER, WORDS, FP8)
        acc = _slice_dot(acc, w, x, scales_ptr, r, s, IN, GROUP, DOT_DTYPE)
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    if DONE < IN:
        w = tl.load(weight_ptr + DONE, mask=(DONE + k < end)[None, :], other=0.0)
        inside = DONE + tl.arange(0, K_SLICE // 2) * 2 < end if FP8 else DONE + k < end
        x = _load_tokens(x_ptr, DONE, live & inside[None, :], IN, K_SLICE, FP8)
        acc = _slice_dot(acc, w, x, scales_ptr, r, DONE, IN, GROUP, DOT_DTYPE)
    if FP8 and GROUP == 0:
        acc *= scales[:, None]
    if PARTS > 0:
        acc *= factor[None, :]
    return acc


@triton.jit
def load_squares(squares_ptr, b, PARTS: tl.constexpr):
    """Partial sums `[PARTS, TOKENS]`; PARTS is a power of two, unused parts are zero."""
    return tl.load(squares_ptr + tl.arange(0, PARTS)[:, None] * b.shape[0] + b[None, :])


@triton.jit
def inverse_rms(squares, eps, IN: tl.constexpr, SCALE: tl.constexpr):
    """1 / rms of each token `[TOKENS]`, from partial sums of its squares `[parts, TOKENS]`; takes the `SCALE` off as well."""
    return tl.rsqrt(tl.sum(squares, 0) / IN + eps) / SCALE


def slice_of(weight: Any, tile: Tile) -> int:
    """The tile's k_slice, cut so that a slice of FP8 weights is within a group of scales on either half of a row."""
    group = weight.group if isinstance(weight, Fp8) else 0
    return min(tile.k_slice, 2 * group if weight.shape[1] % (2 * group) == 0 else group) if group else tile.k_slice


def operands(linear: Linear, tile: Tile, batch: int) -> tuple[tuple[Tensor, Tensor, Tensor | None], dict[str, Any]]:
    """A projection's weight, bias and scales as the kernels take them, and the constants that go with them. A batch's kernel
    without scales (None, which is no argument of the compiled kernel) is that of dense weights."""
    weight, width = linear.weight, linear.weight.shape[1]
    k_slice, group = slice_of(weight, tile), weight.group if isinstance(weight, Fp8) else 0
    assert batch == 1 or splits_fit(width // k_slice, tile.splits)  # a block without a slice would neither wait nor scale
    shape = {"IN": width, "HAS_BIAS": linear.bias is not None, "ROWS": tile.rows, "K_SLICE": k_slice}
    shape |= {"AHEAD": tile.ahead} if batch == 1 else {"GROUP": group}
    if isinstance(weight, Tensor):
        return (weight, linear.bias if linear.bias is not None else weight, None), shape
    assert isinstance(weight, Fp8)
    codes = weight.codes.view(torch.float8_e4m3fn)
    return (codes, linear.bias if linear.bias is not None else weight.scales, weight.scales), shape


def launch_options(warps: int, stages: int, pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch. FP fusion is named because its default changes between Triton's versions."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return options | ({"launch_pdl": True} if pdl else {})


def dot_dtype(dtype: Any, interpreted: bool) -> Any:
    """The type `tl.dot` multiplies in: the tensors' own, but float32 in Triton's interpreter, where bfloat16 dots are wrong."""
    name = "float32" if interpreted else str(dtype).removeprefix("torch.")
    return {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}[name]


def named_by_place(kind: str) -> Callable[[Any], str]:
    """For `triton.jit`: what a profiler calls each launch of a kernel that has several places in a layer."""

    def name(specialization: Any) -> str:
        given = specialization.constants  # arguments that are None are among them
        place = "norm_gate_up" if given["GATED"] else "norm_linear" if "residual_ptr" in given else "proj_residual"
        return f"_{place}_{kind}_kernel"

    return name
