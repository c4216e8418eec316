"""The byte arithmetic of a step: it adds up to what the config says a token reads, and has as many launches as the ops sets."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.arithmetic import (
    H200,
    SIZES,
    WITH_PDL,
    Ceilings,
    Launch,
    chain_us,
    in_order,
    step_bytes,
    step_launches,
    step_ms,
)
from models.random_weights import SHAPES
from runtime.ops.fused import FusedOps
from runtime.ops.unfused import UnfusedOps

PLAIN, PDL = ((node, *(size / 1e6 + beyond for size in SIZES[1:])) for node, beyond in ((1.0, 2.0), (0.5, 1.5)))
WAYS = {way: (PDL if way.endswith(WITH_PDL) else PLAIN)[: len(us)] for way, us in H200.ways.items()}
GIVEN = Ceilings(1000.0, 800.0, 100.0, 9.0, 10.0, WAYS | {"library": (1.0, 20.0, 50.0, 200.0)}, 3.0, 1 << 18, "given")


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


def test_a_time_is_that_of_a_chain_which_reads_as_many_bytes_the_same_way():
    config = SHAPES["llama-2-7b"]
    apart, one, many = (
        {each.name: each for each in step_launches(config, "bfloat16", *words)}
        for words in ((1, 512, "unfused"), (1, 512, "fused"), (16, 512, "fused"))
    )
    assert apart["q"].hbm_bytes == SIZES[2]
    assert GIVEN.predicted_us(apart["q"], pdl=False) == 50.0
    assert GIVEN.predicted_us(one["norm_gate_up"], pdl=False) == pytest.approx(one["norm_gate_up"].hbm_bytes / 1e6 + 2.0)
    assert GIVEN.predicted_us(one["norm_gate_up"], pdl=True) == pytest.approx(one["norm_gate_up"].hbm_bytes / 1e6 + 1.5)
    assert GIVEN.predicted_us(apart["rope"], pdl=False) == 1.0
    assert (GIVEN.side(apart["q"]), GIVEN.side(apart["rope"])) == ("memory", "launch")
    assert replace(GIVEN, tflops=1.0).side(many["norm_gate_up"]) == "arithmetic"
    slow = replace(GIVEN, tflops=1.0).predicted_us(many["norm_gate_up"], pdl=True)
    assert slow == many["norm_gate_up"].operations / 1e6


def test_launches_read_by_the_way_of_their_kernel_and_meet_where_they_are_split():
    def ways(batch, ops):
        launches = step_launches(SHAPES["qwen3-8b"], "bfloat16", batch, 512, ops)
        return {each.name: each.way for each in launches}, {each.name for each in launches if each.meets}

    fused, met = ways(1, "fused")
    assert (set(fused.values()), met) == ({"stream"}, {"attention", "sampler"})
    fused, met = ways(8, "fused")
    assert (set(fused.values()), met) == ({"dots"}, {"attention", "sampler", "proj_residual", "proj_residual 2"})
    unfused, met = ways(8, "unfused")
    assert met == {"attention", "sampler"}
    assert {name for name, way in unfused.items() if way == "reduction"} == {"norm", "norm 2", "norm 3", "q norm", "k norm"}
    products = {"q", "k", "v", "output", "gate", "up", "down", "LM head"}
    assert {name for name, way in unfused.items() if way == "library"} == products
    assert unfused["attention"] == "dots"
    meets = Launch("x", "x", 1, 0, 0, 0, "stream", meets=True)
    assert GIVEN.predicted_us(meets, pdl=False) - GIVEN.predicted_us(replace(meets, meets=False), pdl=False) == 3.0


@pytest.mark.parametrize("way", ["stream", "dots", "library", "row", "reduction"])
def test_a_prediction_grows_with_the_bytes_and_never_jumps(way):
    """A launch that streamed just longer than a node takes was once told a whole boundary more than one just shorter."""
    us, step = GIVEN.ways[way], 100_000
    found = [chain_us(us, i * step, GIVEN.read_gbps) for i in range(3000)]
    measured = [(SIZES[i], each) for i, each in enumerate(us)]
    assert [chain_us(us, size, GIVEN.read_gbps) for size, _ in measured] == pytest.approx([each for _, each in measured])
    steepest = max([1e-3, *((y - x) / (b - a) for (a, x), (b, y) in pairwise(measured))])
    assert all(0 < b - a <= step * steepest + 1e-9 for a, b in pairwise(found))


def test_the_h200s_figures_put_a_7b_step_over_its_floor():
    """13.21 GB and the K/V of 512 positions take 3.00 ms at 4.49 TB/s."""
    launches = step_launches(SHAPES["llama-2-7b"], "bfloat16", 1, 512, "fused")
    assert 3.0 < step_ms(launches, H200, pdl=True) < 3.4
