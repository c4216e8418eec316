"""The bytes of each launch: nothing is counted twice or left out, and fusing removes activations alone."""

from pathlib import Path

import pytest

from models.config import ModelConfig
from models.traffic import around_launches, layer_launches
from runtime.ops.fused import FusedOps
from runtime.ops.unfused import UnfusedOps
from runtime.sampling import Sampler

LLAMA = ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096)
QWEN = ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, qk_norm=True)
BIASED = ModelConfig("llama", 512, 64, 160, 2, 4, 2, 16, 128, qkv_bias=True, o_bias=True, mlp_bias=True, window=8, tied=True)


@pytest.mark.parametrize("ops", [FusedOps, UnfusedOps])
@pytest.mark.parametrize("config", [LLAMA, QWEN, BIASED], ids=["llama", "qwen3", "biased"])
class TestBothSets:
    def test_there_are_as_many_launches_as_the_ops_set_plays(self, config, ops):
        layer = layer_launches(config, ops.name, "bfloat16")
        assert len(layer) == ops.launches_per_layer + ops.launches_per_qk_norm * config.qk_norm
        assert len(around_launches(config, ops.name, "bfloat16")) == ops.launches_around + Sampler.launches

    @pytest.mark.parametrize("batch", [1, 3])
    def test_the_weights_of_a_step_are_those_the_config_counts(self, config, ops, batch):
        layer = layer_launches(config, ops.name, "float16", batch, context=100)
        embed, *rest = around_launches(config, ops.name, "float16", batch)
        weights = config.num_layers * sum(launch.weight_bytes for launch in layer) + sum(each.weight_bytes for each in rest)
        assert weights == config.bytes_per_token("float16")
        assert embed.weight_bytes == batch * config.hidden_size * 2

    @pytest.mark.parametrize("context", [0, 5, 100])
    def test_keys_and_values_are_written_once_and_read_as_far_as_the_window_goes(self, config, ops, context):
        per_position = config.kv_bytes_per_position("float32") // config.num_layers
        seen = min(context + 1, config.window or context + 1)
        read = seen if ops is UnfusedOps else seen - 1
        assert sum(each.kv_bytes for each in layer_launches(config, ops.name, "float32", 2, context)) == 2 * per_position * (
            1 + read
        )


@pytest.mark.parametrize("config", [LLAMA, QWEN, BIASED], ids=["llama", "qwen3", "biased"])
def test_fused_launches_do_the_unfused_ones_work_in_their_order_and_move_less(config):
    fused, unfused = (layer_launches(config, ops, "bfloat16", 1, 512) for ops in ("fused", "unfused"))
    assert [name for launch in fused for name in launch.fuses] == [launch.name for launch in unfused]
    start = 0
    for launch in fused:
        parts = unfused[start : start + len(launch.fuses)]
        start += len(parts)
        assert launch.weight_bytes == sum(part.weight_bytes for part in parts)
        assert launch.total_bytes < sum(part.total_bytes for part in parts)


def test_a_layer_of_llama_2_7b_by_hand():
    """At batch 1 fusing saves boundaries and hardly a byte: activations are a thousandth of the traffic."""
    fused, unfused = (layer_launches(LLAMA, ops, "bfloat16", 1, 512) for ops in ("fused", "unfused"))
    c, f = 4096, 11008
    assert [each.weight_bytes for each in fused] == [2 * n for n in (c + 3 * c * c, 0, c * c, c + 2 * c * f, c * f)]
    assert fused[1].kv_bytes == 513 * 2 * c * 2
    assert fused[3].activation_bytes == 2 * (c + f)
    total = sum(each.total_bytes for each in fused)
    assert total < sum(each.total_bytes for each in unfused) < 1.002 * total


def test_the_pages_name_launches_as_the_measurements_do():
    """SiLU · up was SiLU · mul there."""
    table = (Path(__file__).parents[2] / "docs" / "why-four-kernels.md").read_text()
    spelled = {"rope": "rotation", "output": "output projection", "down": "down projection"}
    for launch in layer_launches(LLAMA, "fused", "bfloat16"):
        fused = ", ".join(spelled.get(name, name) for name in launch.fuses)
        assert f"`{launch.name}` | {fused} |" in table.replace("` again", "`")
