"""The byte arithmetic of a step: it adds up to what the config says a token reads, and has as many launches as the ops sets."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.arithmetic import H200, Ceilings, Launch, in_order, step_bytes, step_launches, step_ms
from models.random_weights import SHAPES
from runtime.ops.fused import FusedOps
from runtime.ops.unfused import UnfusedOps

GIVEN = Ceilings(1000.0, 800.0, 100.0, 9.0, 10.0, 1.0, 0.5, 2.0, 1.5, "given")


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_bytes_of_all_launches_are_those_a_token_must_read(name):
    config = SHAPES[name]
    table_row = 2 * config.hidden_size  # the embedding's, which the config leaves out
    fused, unfused = (step_bytes(step_launches(config, "bfloat16", 1, 512, ops)) - table_row for ops in ("fused", "unfused"))
    assert fused == config.bytes_per_token("bfloat16", 512)
    assert unfused - fused == config.kv_bytes_per_position("bfloat16")  # written by a launch of its own, and read back


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_with_fewer_bits_a_fused_step_reads_fewer_bytes_for_the_same_products(name, weights):
    config = SHAPES[name]
    dense, low = (step_launches(config, "bfloat16", 1, 512, "fused", each) for each in ("bf16", weights))
    assert step_bytes(low) - 2 * config.hidden_size == config.bytes_per_token("bfloat16", 512, weights)
    assert [each.operations for each in low] == [each.operations for each in dense]
    assert step_bytes(low) < step_bytes(dense) * (0.7 if weights == "fp8" else 0.55)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_unfused_every_weight_of_few_bits_is_made_dense_for_its_products(weights):
    config = SHAPES["llama-2-7b"]
    launches = step_launches(config, "bfloat16", 1, 512, "unfused", weights)
    made = [each for each in launches if each.name.startswith("make dense")]
    assert [each.into for each in made] == ["norm_qkv_rope", "proj_residual", "norm_gate_up", "proj_residual 2"]
    assert made[0].hbm_bytes > 2 * 3 * 4096 * 4096  # written whole, and its few bits read
    assert {each.operations for each in made} == {0}
    around = 1  # the sampler
    layer = UnfusedOps.launches_per_layer + UnfusedOps.launches_per_lowbit
    assert len(in_order(launches)) == config.num_layers * layer + UnfusedOps.launches_around + around
    names = [each.name for each in launches]
    assert names[names.index("make dense") :][:2] == ["make dense", "q"]


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3-8b"])
def test_a_step_has_as_many_launches_as_its_ops_set_says(name):
    config = SHAPES[name]
    around = 1  # the sampler
    for ops in (FusedOps, UnfusedOps):
        layer = ops.launches_per_layer + (ops.launches_per_qk_norm if config.qk_norm else 0)
        launches = in_order(step_launches(config, "bfloat16", 1, 512, ops.name))
        assert len(launches) == config.num_layers * layer + ops.launches_around + around
    assert [each.name for each in launches[:3]] == ["embed", "norm", "q"]
    assert [each.name for each in launches[-2:]] == ["LM head", "sampler"]


def test_every_unfused_launch_has_a_fused_one_that_does_its_work():
    config = SHAPES["qwen3-8b"]
    fused = {each.name: each for each in step_launches(config, "bfloat16", 4, 512, "fused")}
    apart = step_launches(config, "bfloat16", 4, 512, "unfused")
    for name, launch in fused.items():
        parts = [each for each in apart if each.into == name]
        assert parts, name
        assert sum(each.l2_bytes for each in parts) >= launch.l2_bytes - launch.hbm_bytes
    assert {each.into for each in apart} == set(fused)


def test_weights_are_read_once_for_all_rows_and_keys_once_a_row():
    config = SHAPES["llama-2-7b"]
    one, eight = ({each.name: each for each in step_launches(config, "bfloat16", b, 512, "fused")} for b in (1, 8))
    assert one["norm_gate_up"].hbm_bytes == eight["norm_gate_up"].hbm_bytes == 2 * (2 * 11008 * 4096 + 4096)
    assert 8 * one["attention"].hbm_bytes == eight["attention"].hbm_bytes == 8 * 2 * 2 * 4096 * 512
    assert eight["norm_gate_up"].operations == pytest.approx(8 * 2 * 22016 * 4096, rel=1e-3)  # the norm's are counted too
    assert eight["attention"].operations == 8 * 4 * 4096 * 512


def test_a_window_bounds_the_keys_read():
    config = SHAPES["mistral-7b-v0.1"]
    near, far = ({each.name: each for each in step_launches(config, "bfloat16", 1, n, "fused")} for n in (4096, 9000))
    assert near["attention"].hbm_bytes == far["attention"].hbm_bytes


def test_a_time_is_bytes_over_the_ceiling_and_a_boundary_or_a_node():
    config = SHAPES["llama-2-7b"]
    launches = {each.name: each for each in step_launches(config, "bfloat16", 1, 512, "unfused")}
    assert GIVEN.predicted_us(launches["q"], pdl=False) == pytest.approx(2 * 4096 * 4096 / 1e6 + 2.0)
    assert GIVEN.predicted_us(launches["q"], pdl=True) == pytest.approx(2 * 4096 * 4096 / 1e6 + 1.5)
    assert GIVEN.predicted_us(launches["rope"], pdl=False) == 1.0
    assert (GIVEN.side(launches["q"]), GIVEN.side(launches["rope"])) == ("memory", "launch")
    many = {each.name: each for each in step_launches(config, "bfloat16", 16, 512, "unfused")}
    assert replace(GIVEN, tflops=1.0).side(many["q"]) == "arithmetic"


@pytest.mark.parametrize("pdl", [True, False])
def test_a_prediction_grows_with_the_bytes_and_never_jumps(pdl):
    """A launch that streamed just longer than a node takes was once told a whole boundary more than one just shorter."""
    step = 10_000
    found = [H200.predicted_us(Launch("x", "x", 1, i * step, 0, 0), pdl) for i in range(3000)]
    node, boundary = (H200.node_pdl_us, H200.boundary_pdl_us) if pdl else (H200.node_us, H200.boundary_us)
    streams = step / H200.read_gbps / 1e3
    assert found[0] == node
    assert found[-1] == pytest.approx(2999 * streams + boundary)
    assert all(streams <= b - a + 1e-9 and b - a <= 2 * streams + 1e-9 for a, b in pairwise(found))


def test_the_h200s_figures_put_a_7b_step_over_its_floor():
    """13.21 GB and the K/V of 512 positions take 3.00 ms at 4.49 TB/s."""
    launches = step_launches(SHAPES["llama-2-7b"], "bfloat16", 1, 512, "fused")
    assert 3.0 < step_ms(launches, H200, pdl=True) < 3.2
