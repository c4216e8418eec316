"""One token's products through the tensor cores against float64. Runs as test_kernels does: on a GPU, or in the interpreter."""

import pytest
import torch

from runtime.ops import Linear
from runtime.ops._gemv import Scaled
from runtime.ops.configs import Tile, fits
from tests.runtime.ops.test_kernels import DEVICE, INTERPRETED, TOLERANCE, pytestmark, random  # noqa: F401

DTYPES = (torch.bfloat16, torch.float16)
TILES = [
    Tile(2, 256, 1, 1, ahead=4),  # a warp a block
    Tile(8, 256, 4, 1, ahead=2, registers=96),  # four warps along rows
    Tile(4, 512, 2, 1, ahead=1),  # two share a row, two pairs each
    Tile(8, 512, 4, 1, ahead=9),  # two by two, more slices ahead than there are
]


def near(ours, exact):
    limit = TOLERANCE[ours.dtype] if ours.dtype != torch.float32 else 2e-6
    error = (ours.double() - exact).abs().max() / exact.abs().max()
    assert error <= limit


def begun(x, norm):
    made = Scaled.make(x.shape[1], x.dtype, x.device, 3, 1)
    made.x.copy_((x.double() * norm.double() * made.scale).to(x.dtype))
    made.squares[:3, 0] = torch.stack([part.double().pow(2).sum() for part in x[0].chunk(3)]).float()
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_norms_product_is_that_of_the_norm_begun(dtype, tile, biased):
    from runtime.ops.token_linear import token_linear

    for n, width in ((8, 512), (21, 1536)):
        assert fits(tile, "norm_linear", n, width, True, 2)
        x, norm, out = random(1, width, dtype=dtype), random(width, dtype=dtype), torch.empty((1, n), device=DEVICE)
        linear = Linear(random(n, width, dtype=dtype), random(n, dtype=dtype) if biased else None)
        made = begun(x, norm)
        token_linear(x, linear, out, tile, False, INTERPRETED, scaled=made, eps=1e-5)
        normed = made.x.double() / made.scale * (x.double().pow(2).mean() + 1e-5).rsqrt()
        near(out, normed @ linear.weight.double().T + (linear.bias.double() if biased else 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
def test_a_projection_adds_its_residual_and_begins_the_next_norm(dtype, tile):
    from runtime.ops.token_linear import token_linear

    for n, width in ((8, 512), (22, 1536)):
        a, x, norm = random(1, width, dtype=dtype), random(1, n, dtype=dtype), random(n, dtype=dtype)
        linear, out = Linear(random(n, width, dtype=dtype) / 16), torch.empty((1, n), device=DEVICE, dtype=dtype)
        made = Scaled.make(n, dtype, DEVICE, -(-n // tile.rows), 1)
        token_linear(a, linear, out, tile, False, INTERPRETED, residual=x, next_norm=norm, next_scaled=made)
        near(out, x.double() + a.double() @ linear.weight.double().T)
        near(made.x, out.double() * norm.double() * made.scale)
        near(made.squares.sum(), out.double().pow(2).sum())  # rows of two programs are counted once


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("biased", [False, True])
def test_gate_and_up_are_one_product(dtype, tile, biased):
    from runtime.ops.token_linear import token_linear

    for n, width in ((8, 512), (13, 1536)):
        assert fits(tile, "norm_gate_up", n, width, True, 2)
        x, norm, out = (
            random(1, width, dtype=dtype),
            random(width, dtype=dtype),
            torch.empty((1, n), device=DEVICE, dtype=dtype),
        )
        linear = Linear(random(2 * n, width, dtype=dtype) / 16, random(2 * n, dtype=dtype) if biased else None)
        made = begun(x, norm)
        token_linear(x, linear, out, tile, False, INTERPRETED, scaled=made, eps=1e-5, gated=True)
        normed = made.x.double() / made.scale * (x.double().pow(2).mean() + 1e-5).rsqrt()
        gate, up = (normed @ linear.weight.double().T + (linear.bias.double() if biased else 0.0)).chunk(2, 1)
        near(out, gate * gate.sigmoid() * up)


@pytest.mark.parametrize("kernel", ["norm_linear", "proj_residual", "norm_gate_up"])
def test_only_tiles_whose_warps_all_have_rows_fit(kernel):
    pair = 1 if kernel == "norm_gate_up" else 2
    assert fits(Tile(4 * pair, 256, 4, 1), kernel, 64, 1024, True, 2)
    assert not fits(Tile(2 * pair, 256, 4, 1), kernel, 64, 1024, True, 2)  # two warps without a pair
    assert fits(Tile(2 * pair, 512, 4, 1), kernel, 64, 1024, True, 2)
    assert not fits(Tile(8, 512, 1, 1), kernel, 64, 1024, True, 2)  # one warp takes 256
    assert not fits(Tile(8, 1024, 4, 1), kernel, 64, 1536, True, 2)  # which leaves half a slice
    assert not fits(Tile(8, 128, 1, 1), kernel, 64, 1024, True, 2)
