"""The experiments' Triton kernels give what torch gives; played in Triton's interpreter (test_interpreter.py), or on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from triton import knobs

from bench import chains, experiments
from bench import fusion_kernels as own

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1 or a GPU"
)


def played(variant):
    torch.manual_seed(0)
    return variant.make(DEVICE)()


def close(ours, theirs, atol=0.02):
    print(f"largest difference {float((ours.float() - theirs.float()).abs().max()):.2e}")
    torch.testing.assert_close(ours.float(), theirs.float(), atol=atol, rtol=0.02)


def named(experiment):
    return {variant.name: variant for variant in experiment.variants}


@pytest.mark.parametrize("shape", [(8, 1024), (16, 2048), (1, 8192), (3, 8192)])
def test_the_chain_drops_a_tenth_and_scales_the_rest(shape):
    torch.manual_seed(0)
    x, b = (torch.randn(size, dtype=torch.bfloat16, device=DEVICE) for size in (shape, shape[1:]))
    out = own.bias_gelu_dropout(x, b, torch.empty_like(x), 0.1, 7)
    again = own.bias_gelu_dropout(x, b, torch.empty_like(x), 0.1, 7)
    want = torch.nn.functional.gelu(x + b, approximate="tanh").float() / 0.9
    dropped = (out == 0) & (want.abs() > 1e-3)
    assert torch.equal(out, again)
    assert 0.08 < float(dropped.float().mean()) < 0.12
    close(torch.where(dropped, want, out.float()), want)


def test_every_value_of_the_chain_has_a_draw_of_its_own():
    x, b = torch.full((16, 2048), 3.0, device=DEVICE), torch.zeros(2048, device=DEVICE)
    kept = own.bias_gelu_dropout(x, b, torch.empty_like(x), 0.5, 7).view(-1, 1024) != 0
    assert len({tuple(row.tolist()) for row in kept}) == len(kept)
    assert float(kept.float().mean()) == pytest.approx(0.5, abs=0.02)


def test_the_chain_of_very_large_and_small_values_stays_finite():
    x = torch.tensor([-3e38, -1e4, -88.0, 0.0, 88.0, 1e4] + [0.0] * 8186, device=DEVICE).view(8, 1024)
    out = own.bias_gelu_dropout(x, torch.zeros(1024, device=DEVICE), torch.empty_like(x), 0.0, 7)
    torch.testing.assert_close(out, torch.nn.functional.gelu(x, approximate="tanh"), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [own.SOFTMAX, own.LAYER_NORM, own.RMS_NORM])
@pytest.mark.parametrize(("width", "widest"), [(96, 512), (257, 512), (128, 64), (320, 64)])
def test_a_row_is_reduced_in_registers_and_online(kind, width, widest):
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((3, width), (width,)))
    want = {
        own.SOFTMAX: lambda: torch.softmax(x.float(), -1),
        own.LAYER_NORM: lambda: torch.nn.functional.layer_norm(x.float(), (width,), weight.float(), eps=1e-6),
        own.RMS_NORM: lambda: torch.nn.functional.rms_norm(x.float(), (width,), weight.float(), eps=1e-6),
    }[kind]()
    close(own.row_reduction(x, weight, torch.empty_like(x), kind, widest), want)


@pytest.mark.parametrize("widest", [512, 64])
@pytest.mark.parametrize(("mean", "first"), [(1000.0, 0.0), (-30000.0, 0.0), (0.0, 3000.0)])
def test_a_layer_norm_far_from_zero_or_from_its_first_value_keeps_its_variance(mean, first, widest):
    torch.manual_seed(0)
    x = mean + torch.randn(3, 320, device=DEVICE)
    x[:, 0] += first
    want = torch.nn.functional.layer_norm(x.double(), (320,), eps=1e-6)
    out = own.row_reduction(x, torch.ones(320, device=DEVICE), torch.empty_like(x), own.LAYER_NORM, widest)
    torch.testing.assert_close(out.double(), want, atol=1e-6 * abs(mean) + 1e-4, rtol=1e-4)


def test_every_variant_of_a_row_and_of_a_product_agrees():
    rows = named(experiments.rows(own.LAYER_NORM, 64, 256))
    close(played(rows["Triton"]), played(rows["eager, op by op"]), 0.05)
    product = named(experiments.gemm(64, 64, 64, "", block=(32, 32, 16)))
    close(played(product["Triton, bias and GELU inside"]), played(product["cuBLAS, eager bias and GELU"]), 0.05)
    close(played(product["Triton, eager bias and GELU"]), played(product["cuBLAS, eager bias and GELU"]), 0.05)
    close(played(product["Triton, residual inside"]), played(product["cuBLAS, eager residual"]), 0.05)


def test_attention_without_its_scores_is_attention():
    variants = named(experiments.attention(2, 64, 16, block=(32, 16)))
    close(played(variants["Triton"]), played(variants["three kernels (and q's scale)"]))


def test_a_chains_links_sum_what_they_read():
    x, w, sums = torch.randn(64, device=DEVICE), torch.randn(3 * 256, device=DEVICE), torch.zeros(64, device=DEVICE)
    chains.stream_kernel[(3,)](w, x, sums, BLOCK=64, BLOCKS=4, PDL=False)
    close(sums[:3], (w.view(3, 4, 64) * x).sum((1, 2)), 1e-4)
    columns, tiles, out = (torch.randn(shape, device=DEVICE) for shape in ((2, 16, 32), (3, 2, 64, 32), (3, 64, 16)))
    chains.dots_kernel[(3,)](tiles, columns, out, 2, ROWS=64, SLICE=32, COLUMNS=16, PDL=False)
    close(out, torch.einsum("ptrk,tck->prc", tiles, columns), 0.1)


def test_the_last_of_the_blocks_that_meet_sums_all_and_leaves_the_counter_zero():
    partial, out, counter = torch.zeros(8 * 32, device=DEVICE), torch.randn(2, 32, device=DEVICE), torch.zeros(2, device=DEVICE)
    want, counter = out.clone(), counter.int()
    for parts in (4, 4, 1):
        chains.meeting_kernel[(2 * parts,)](partial, counter, out, VALUES=32, PARTS=parts)
        close(out, want, 1e-6)
    assert counter.tolist() == [0, 0]


def test_links_alive_together_or_in_turns_give_one_sum():
    few, many = experiments.spill(256, 16, 4, block=128).variants
    close(played(few), played(many))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs no GPU: there a replay returns nothing")
def test_few_rows_in_a_block_each_or_op_by_op_give_one_norm():
    fused, apart = experiments.few_rows(2, 300).variants
    close(played(fused), played(apart), 0.05)
