"""Weights of 8 and 4 bits against their definitions: rounding, saturation, zeros, denormals, tails, and the order in memory.

Runs twice: as it is, and in Triton's interpreter (see test_interpreter), where the kernel takes part.
"""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from runtime.ops import Attention, Linear, SlotState
from runtime.ops.configs import Tile, fits
from runtime.ops.fp8 import Fp8
from runtime.ops.fused import FusedOps
from runtime.ops.lowbit import FORMATS, LowBit, dense, quantize
from runtime.ops.lowbit_batch import lowbit_tile
from runtime.ops.tuned import TileKey

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_kernels = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="needs a CUDA device, or the interpreter")

SCALES = {"fp8": torch.float32, "int4": torch.bfloat16}


def lowbit(weight: torch.Tensor, format: str, group: int = 0) -> Fp8 | LowBit:
    weight = weight.to(DEVICE)
    scratch = torch.empty(weight.numel(), device=DEVICE)
    made = (
        Fp8.empty(tuple(weight.shape), group, scratch)
        if format == "fp8"
        else LowBit.empty(tuple(weight.shape), group, scratch, SCALES[format])
    )
    for row in range(0, len(weight), 16):
        made[row : row + 16].copy_(weight[row : row + 16])
    return made


def random(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width)) * 0.02


SHAPES = [("fp8", 0, 48, 256), ("fp8", 0, 40, 100), ("fp8", 128, 16, 384), ("int4", 128, 40, 384), ("int4", 64, 16, 192)]
SHAPES += [("int4", 32, 17, 96)]


@pytest.mark.parametrize(("format", "group", "rows", "width"), SHAPES)
def test_what_is_packed_is_unpacked_again_and_dense_by_kernel_and_twin_alike(format, group, rows, width):
    weight = random(rows, width)
    made = lowbit(weight, format, group)
    codes, scales = quantize(weight.to(DEVICE), format, group, SCALES[format])
    assert torch.equal(made.unpack(), codes)
    values = codes.view(torch.float8_e4m3fn).float() if format == "fp8" else codes.float() - 8
    expected = values * scales.float().repeat_interleave(group or width, 1)[:, :width]
    assert torch.equal(made.dense_torch(), expected)
    assert torch.equal(dense(made), expected)
    assert dense(made).data_ptr() == made.scratch.data_ptr()


@needs_kernels
@pytest.mark.parametrize(("format", "group", "rows", "width"), SHAPES)
def test_the_kernel_makes_the_same_matrix_as_its_twin(format, group, rows, width):
    made = lowbit(random(rows, width), format, group)
    assert torch.equal(made.dense_into(torch.empty(made.shape, device=DEVICE)), made.dense_torch())


@needs_kernels
def test_every_fp8_code_comes_back_as_its_value_denormals_and_signed_zeros_too():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(16, 1)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN, which no weight is
    made = Fp8.empty((16, 256), 0, torch.empty(16 * 256, device=DEVICE))
    made.fill(0, codes, torch.ones(16, 1, device=DEVICE))
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(made.dense_torch(), expected)
    assert torch.equal(made.dense_into(torch.empty_like(expected)), expected)


@needs_kernels
def test_int4_zeros_of_their_own_are_taken_off_before_the_scale():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 128), generator=generator).to(torch.uint8)
    scales, zeros = torch.rand(32, 4, generator=generator).half(), torch.randint(0, 17, (32, 4), generator=generator)
    made = LowBit.empty((32, 128), 32, torch.empty(32 * 128, device=DEVICE), torch.float16, zeros=True)
    made.fill(0, codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE, torch.uint8))
    expected = (codes.float() - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(made.dense_torch().cpu(), expected)
    assert torch.equal(made.dense_into(torch.empty(32, 128, device=DEVICE)).cpu(), expected)


def test_fp8_rounds_to_the_nearest_and_the_largest_of_a_row_is_448():
    weight = random(64, 512)
    made = lowbit(weight, "fp8").dense_torch().cpu()
    scale = weight.abs().amax(1, keepdim=True) / 448
    step = torch.maximum(2.0 ** (weight.abs() / scale).log2().floor(), torch.tensor(2.0**-6)) / 8 * scale
    assert ((made - weight).abs() <= step / 2 * 1.0001).all()
    torch.testing.assert_close(made.abs().amax(1), (448 * scale)[:, 0], rtol=1e-6, atol=0)  # a GPU divides by another way


def test_int4_rounds_to_the_nearest_and_the_number_furthest_from_zero_is_kept():
    weight = random(64, 512)
    made = lowbit(weight, "int4", 128).dense_torch().cpu().view(64, 4, 128)
    grouped = weight.view(64, 4, 128)
    furthest = grouped.abs().amax(2, keepdim=True)
    far = grouped.abs().argmax(2, keepdim=True)
    assert ((made - grouped).gather(2, far).abs() <= furthest * 2**-8).all()  # the scale is rounded to bfloat16
    clipped = grouped * -grouped.gather(2, far).sign() > furthest * 7 / 8  # +8 has no code
    error = (made - grouped).abs() / (furthest / 8)
    assert (error[~clipped] <= 0.54).all()
    assert (error[clipped] <= 1.04).all()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_and_of_denormals_stay_next_to_zero_and_finite(format):
    weight = random(16, 256)
    weight[3], weight[5], weight[7, 1:] = 0, 1e-41, 0
    made = lowbit(weight, format, 64 if format == "int4" else 0).dense_torch().cpu()
    assert torch.equal(made[3], torch.zeros(256))
    assert (made[5].abs() <= 1e-38).all()
    assert torch.equal(made[7, 1:], torch.zeros(255))
    torch.testing.assert_close(made[7, 0], weight[7, 0], rtol=2**-8, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_no_number_is_refused(format, value):
    weight = random(16, 128)
    weight[2, 100] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight, format, 128, torch.float32)


def test_a_width_that_groups_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"100 in features are not a multiple of the group of 64"):
        quantize(random(16, 100), "int4", 64, torch.bfloat16)


def test_bytes_are_those_of_the_codes_and_scales():
    assert lowbit(random(64, 256), "fp8").nbytes == 64 * 256 + 64 * 4
    assert lowbit(random(64, 256), "int4", 128).nbytes == 64 * 256 // 2 + 64 * 2 * 2


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYER = [
    ("fp8", 0, False),
    ("fp8", 128, False),
    *(("int4", group, zeros) for group in (128, 64, 32) for zeros in (False, True)),
]
LAYERS = [(*layer, batch, dtype) for layer in LAYER for batch in (1, 3) for dtype in DTYPES]


def with_zeros(weight: LowBit) -> LowBit:
    """The same codes, of which any from 0 to 16 stands for 0."""
    return replace(weight, zeros=torch.randint_like(weight.scales, 17).to(torch.uint8))


def close(ours, wanted):
    error = ((ours.float() - wanted).abs().max() / wanted.abs().max()).item()
    print(f"error {error:.1e} of the largest value")
    assert error <= (1e-4 if ours.dtype == torch.float32 else 2e-2)


@needs_kernels
@pytest.mark.parametrize(("format", "group", "zeros", "batch", "dtype"), LAYERS[:: 4 if INTERPRETED else 1])  # which is slow
def test_a_layers_projections_are_those_of_the_dense_weights(format, group, zeros, batch, dtype):
    torch.manual_seed(0)
    ops, c, f = FusedOps(DEVICE.type == "cuda", INTERPRETED), 128, 128
    x, a, norm = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((batch, c), (batch, f), (c,)))
    weights = (lowbit(random(*shape), format, group) for shape in ((c, f), (2 * f, c)))
    down, gate_up = (
        Linear(with_zeros(weight) if zeros else weight, torch.randn(weight.shape[0], device=DEVICE).to(dtype))
        for weight in weights
    )
    out = ops.proj_residual(a, down, x, norm)
    once = x.float() + F.linear(a.float(), down.weight.dense_torch(), down.bias.float())
    close(out, once)
    first = out.clone()
    assert ops.proj_residual(a, down, x.clone(), norm).equal(first)  # counters are back at zero: the same launch, the same bits
    x = ops.proj_residual(a, down, x, norm)
    normed = F.rms_norm(x.float(), (c,), norm.float(), 1e-5)
    gate, up = F.linear(normed, gate_up.weight.dense_torch(), gate_up.bias.float()).chunk(2, -1)
    close(ops.norm_gate_up(x, norm, gate_up, 1e-5), F.silu(gate) * up)
    logits = ops.norm_lm_head(x, norm, gate_up, 1e-5)
    assert logits.dtype == torch.float32
    if dtype == torch.float32:
        close(logits, torch.cat((gate, up), -1))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("spread", [0, 2])
@pytest.mark.parametrize("group", [0, 128])
def test_a_batchs_products_with_fp8_weights_are_nearer_than_rounding_x_to_bfloat16_would_be(group, spread, dtype):
    generator, width = torch.Generator().manual_seed(spread), 1024
    exact = torch.randn(3, width, generator=generator) * torch.exp(spread * torch.randn(3, width, generator=generator))
    weight, one = lowbit(random(256, width), "fp8", group), torch.ones(width, dtype=dtype, device=DEVICE)
    ops, x = FusedOps(DEVICE.type == "cuda", INTERPRETED), exact.to(DEVICE, dtype)
    nothing = Linear(torch.zeros(width, 16, dtype=dtype, device=DEVICE))
    x = ops.proj_residual(torch.zeros(3, 16, dtype=dtype, device=DEVICE), nothing, x, one)  # which begins the norm

    def products(x):
        return F.rms_norm(x.double(), (width,)) @ weight.dense_torch().double().t()

    ours = ops.norm_lm_head(x, one, Linear(weight), 0.0) - products(x)
    rounding = products(exact.bfloat16().to(DEVICE)) - products(exact.to(DEVICE))
    print(f"error {ours.square().mean().sqrt():.1e}, of rounding to bfloat16 {rounding.square().mean().sqrt():.1e}")
    assert ours.square().mean() < rounding.square().mean()


@needs_kernels
@pytest.mark.parametrize(
    ("group", "zeros", "width", "batch"),
    [(128, False, 1152, 2), (128, True, 1024, 16), (64, False, 1088, 16), (32, True, 544, 9)],
)
def test_a_batchs_products_with_int4_weights_are_exact_over_steps_and_splits_that_do_not_divide(group, zeros, width, batch):
    """All but the sums: a bfloat16 x and the codes meet as they are."""
    weight, one = lowbit(random(40, width), "int4", group), torch.ones(width, dtype=torch.bfloat16, device=DEVICE)
    weight = with_zeros(weight) if zeros else weight
    assert lowbit_tile(weight).splits > 1
    ops, x = FusedOps(DEVICE.type == "cuda", INTERPRETED), random(batch, width).to(DEVICE, torch.bfloat16)
    nothing = Linear(torch.zeros(width, 16, dtype=torch.bfloat16, device=DEVICE))
    x = ops.proj_residual(torch.zeros(batch, 16, dtype=torch.bfloat16, device=DEVICE), nothing, x, one)  # which begins the norm
    bias = torch.randn(40, device=DEVICE)
    products = F.rms_norm(x.double(), (width,)) @ weight.dense_torch().double().t()
    parts = in_parts(ops, x, one, Linear(weight, bias))
    for ours in (ops.norm_lm_head(x, one, Linear(weight, bias), 0.0), parts.sum(0)):
        error = ((ours - products - bias).abs().max() / products.abs().max()).item()
        print(f"error {error:.1e} of the largest product")
        assert error < 1e-5
    assert len(parts) == lowbit_tile(weight).splits


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES[: 1 if INTERPRETED else 2], ids=str)  # which is slow
@pytest.mark.parametrize(
    ("group", "zeros", "width"),
    [(128, True, 2176), (64, False, 1088), (32, True, 1184), (128, False, 4352), (128, False, 11008), (128, False, 14464)],
)
def test_one_rows_products_with_int4_weights_are_right_over_steps_that_do_not_divide(group, zeros, width, dtype):
    ops, one = FusedOps(DEVICE.type == "cuda", INTERPRETED), torch.ones(width, dtype=dtype, device=DEVICE)
    weights = (lowbit(random(rows, width), "int4", group) for rows in (40, 96))
    proj, gate_up = (Linear(with_zeros(weight) if zeros else weight) for weight in weights)
    table, state = torch.randn(1, width, device=DEVICE).to(dtype), SlotState.allocate(1, DEVICE)
    state.token.zero_()
    x, _ = ops.embed(torch.zeros(1, dtype=torch.int32, device=DEVICE), state, table, one, gate_up)  # which begins the norm
    gate, up = F.linear(F.rms_norm(x.float(), (width,), eps=0.0), gate_up.weight.dense_torch()).chunk(2, -1)
    close(ops.norm_gate_up(x, one, gate_up, 0.0), F.silu(gate) * up)
    residual = torch.randn(1, 40, device=DEVICE).to(dtype)
    out = ops.proj_residual(x, proj, residual, torch.ones(40, dtype=dtype, device=DEVICE))
    close(out, residual + F.linear(x.float(), proj.weight.dense_torch()))


def in_parts(ops, x, norm, qkv):
    """Sums of q, k and v `[P, B, N]`, as attention takes and adds them."""
    spec = Attention(1, 1, 8, 0.0, *torch.zeros(2, 4, 4, device=DEVICE))
    return ops.norm_qkv_rope(x, norm, qkv, spec, None, None, None)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("group", [0, 128])
def test_q_k_and_v_of_fp8_weights_come_in_parts_with_the_bias_in_one(group, dtype):
    weight, one = lowbit(random(64, 1024), "fp8", group), torch.ones(1024, dtype=dtype, device=DEVICE)
    key = TileKey.of("norm_linear", 3, 64, 1024, 4 if dtype == torch.float32 else 1)
    ops = FusedOps(DEVICE.type == "cuda", INTERPRETED, {key: Tile(64, 256, 4, 2, splits=4)})
    x, bias = random(3, 1024).to(DEVICE, dtype), torch.randn(64, device=DEVICE)
    nothing = Linear(torch.zeros(1024, 16, dtype=dtype, device=DEVICE))
    x = ops.proj_residual(torch.zeros(3, 16, dtype=dtype, device=DEVICE), nothing, x, one)  # which begins the norm
    parts = in_parts(ops, x, one, Linear(weight, bias))
    assert len(parts) == 4
    close(parts.sum(0), F.rms_norm(x.float(), (1024,), eps=0.0) @ weight.dense_torch().t() + bias)


@needs_kernels
def test_a_tuned_tile_whose_splits_block_scales_would_leave_without_a_slice_is_passed_over():
    weight, one, tile = lowbit(random(32, 1152), "fp8", 128), torch.ones(1152, device=DEVICE), Tile(16, 256, 4, 2, splits=4)
    assert fits(tile, "norm_linear", 32, 1152, False, 1)
    ops = FusedOps(DEVICE.type == "cuda", INTERPRETED, {TileKey.of("norm_linear", 3, 32, 1152, 4): tile})
    x, nothing = random(3, 1152).to(DEVICE), Linear(torch.zeros(1152, 16, device=DEVICE))
    x = ops.proj_residual(torch.zeros(3, 16, device=DEVICE), nothing, x, one)  # which begins the norm
    parts = in_parts(ops, x, one, Linear(weight))
    assert len(parts) != tile.splits
    close(parts.sum(0), F.rms_norm(x, (1152,), eps=0.0) @ weight.dense_torch().t())


@needs_kernels
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("format", "group", "width"), [("fp8", 0, 100), ("fp8", 0, 1388), ("fp8", 128, 1408), ("int4", 32, 96)]
)
def test_rows_and_in_features_that_tiles_do_not_divide_are_right(format, group, width, batch):
    ops, x = FusedOps(DEVICE.type == "cuda", INTERPRETED), torch.randn(batch, width, device=DEVICE)
    residual = torch.randn(batch, 40, device=DEVICE)
    weight = lowbit(random(40, width), format, group)
    out = ops.proj_residual(x, Linear(weight), residual, torch.ones(40, device=DEVICE))
    close(out, residual + x @ weight.dense_torch().t())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_fp8_code_reaches_the_products_as_its_value_in_both_halves_of_a_row(batch, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN, which no weight is
    weight = Fp8.empty((256, 64), 0, torch.empty(256 * 64, device=DEVICE))
    weight.fill(0, codes[:, None].expand(256, 64), torch.ones(256, 1, device=DEVICE))
    ops, residual = FusedOps(DEVICE.type == "cuda", INTERPRETED), torch.zeros(batch, 256, dtype=dtype, device=DEVICE)
    for k in (3, 40):
        a = torch.zeros(batch, 64, dtype=dtype, device=DEVICE)
        a[:, k] = 1
        out = ops.proj_residual(a, Linear(weight), residual, torch.ones(256, dtype=dtype, device=DEVICE))
        assert torch.equal(out.float(), codes.view(torch.float8_e4m3fn).float().expand(batch, 256))


@needs_kernels
@pytest.mark.parametrize("batch", [1, 2])
def test_a_half_row_may_begin_within_an_fp8_block(batch):
    ops, x = FusedOps(DEVICE.type == "cuda", INTERPRETED), torch.randn(batch, 384, device=DEVICE)
    residual = torch.randn(batch, 32, device=DEVICE)
    weight = lowbit(random(32, 384), "fp8", 128)
    weight.scales[:, 1] *= 100
    out = ops.proj_residual(x, Linear(weight), residual, torch.ones(32, device=DEVICE))
    close(out, residual + x @ weight.dense_torch().t())
