"""Rotary frequencies and tables: numbers known by hand, Hugging Face's, and what a config may and may not say."""

import math

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.config import ModelConfig
from models.decoder import TABLE_ROWS, rotary_tables
from models.rope import RopeConfig
from runtime.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import edit_json, tiny
from tests.rule_n import assert_rule_n, judge, moved, open_model, play, random_ids

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WIDE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CPU = torch.device("cpu")


def plain(head_dim, theta=10000.0):
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def counts(rope, head_dim):
    """How many pairs are unchanged, blended and divided by the whole factor."""
    ratios = [a / b for a, b in zip(rope.inverse_frequencies(head_dim), plain(head_dim, rope.theta), strict=True)]
    kept = sum(ratio == 1 for ratio in ratios)
    divided = sum(math.isclose(ratio, 1 / rope.factor) for ratio in ratios)
    return kept, len(ratios) - kept - divided, divided


def test_llama3_keeps_short_waves_blends_some_and_divides_long_ones():
    rope = RopeConfig("llama3", 10000.0, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies = rope.inverse_frequencies(64)
    assert frequencies[:4] == plain(64)[:4]
    assert frequencies[4] == pytest.approx(0.2443846, rel=1e-6)
    assert frequencies[8] == pytest.approx(0.01304226, rel=1e-6)
    assert frequencies[9:] == pytest.approx([f / 8 for f in plain(64)[9:]])


def test_llama3_at_real_shapes():
    assert counts(RopeConfig("llama3", 5e5, 8.0, 8192), 128) == (29, 6, 29)
    assert counts(RopeConfig("llama3", 5e5, 32.0, 8192), 64) == (15, 3, 14)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.1},
    ],
    ids=str,
)
def test_scaled_frequencies_are_those_of_transformers(tmp_path, scaling):
    tiny(tmp_path, **WIDE, rope_scaling=scaling)
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](AutoConfig.from_pretrained(tmp_path), CPU)
    rope = ModelConfig.from_dir(tmp_path).rope
    assert rope.inverse_frequencies(64) == pytest.approx(theirs.tolist(), rel=1e-5)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_llama3_scaling_agrees_past_the_original_context_and_would_fail_without(tmp_path):
    path = tiny(tmp_path / "scaled", **WIDE, rope_scaling=LLAMA3)
    ids = random_ids(300)
    ours = play(open_model(path), ids, prefill=290, chunk=64)
    verdict = judge(path, ours, ids, torch.bfloat16)
    for position in (0, 63, 64, 100, 299):
        assert verdict.errors[position] <= verdict.bound
    assert moved(path, tiny(tmp_path / "plain", **WIDE), ids) > 20 * verdict.e0


def test_yarn_agrees_in_the_logits(tmp_path):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    verdict = assert_rule_n(tiny(tmp_path / "yarn", **WIDE, rope_scaling=yarn), count=100, prefill=90)
    assert moved(tmp_path / "yarn", tiny(tmp_path / "plain", **WIDE), random_ids(100)) > 20 * verdict.e0


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "rope_type": "linear", "factor": 4},
    ],
    ids=str,
)
def test_either_key_names_the_type(tmp_path, scaling):
    path = tiny(tmp_path, **WIDE, rope_scaling=scaling)
    assert ModelConfig.from_dir(path).rope.inverse_frequencies(64) == [f / 4 for f in plain(64)]
    assert_rule_n(path)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}], ids=str)
def test_no_scaling_is_no_scaling(tmp_path, scaling):
    path = tiny(tmp_path, **WIDE, rope_scaling=scaling)
    assert ModelConfig.from_dir(path).rope == RopeConfig()


@pytest.mark.parametrize(
    ("scaling", "error", "names"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, UnsupportedModelError, "rope_type is 'dynamic'"),
        ({"rope_type": "longrope", "factor": 4.0}, UnsupportedModelError, "rope_type is 'longrope'"),
        ({"rope_type": "foo", "factor": 2.0}, UnsupportedModelError, "rope_type is 'foo'"),
        ({"rope_type": ["linear"], "factor": 2.0}, UnsupportedModelError, "rope_type is"),
        ({"factor": 2.0}, CheckpointError, "rope_type is missing"),
        ({"rope_type": "linear"}, CheckpointError, "factor is missing"),
        ({"rope_type": "linear", "factor": "4"}, CheckpointError, "factor is '4'"),
        ({"rope_type": "linear", "factor": 0}, CheckpointError, "factor is 0"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, CheckpointError, "rope_type is 'linear' and type is 'yarn'"),
        ({**LLAMA3, "high_freq_factor": 1.0}, CheckpointError, "low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": None}, CheckpointError, "low_freq_factor is missing"),
        ("linear", CheckpointError, "rope_scaling is 'linear'"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, scaling, error, names):
    tiny(tmp_path, rope_scaling=scaling)
    with pytest.raises(error, match="rope_scaling") as caught:
        ModelConfig.from_dir(tmp_path)
    assert names in str(caught.value)


@pytest.mark.parametrize("changes", [{"rope_theta": 1.0}, {"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}], ids=str)
def test_numbers_that_give_no_rotation_are_refused(tmp_path, changes):
    """A theta of 1 divided by zero inside yarn."""
    tiny(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="theta must be above 1, factor 1 or above"):
        ModelConfig.from_dir(tmp_path)


def test_partial_rotation_is_refused(tmp_path):
    tiny(tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        ModelConfig.from_dir(tmp_path)


def test_theta_is_found_where_either_generation_of_transformers_writes_it(tmp_path):
    """A reader that looks beside the table alone takes the default of 10000, and the output is quietly wrong."""
    old = tiny(tmp_path / "old", rope_theta=500000.0, drop=["dtype"], torch_dtype="bfloat16")
    new = tiny(tmp_path / "new", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, drop=["rope_theta"])
    ids = random_ids(64)
    a, b = (play(open_model(path), ids, prefill=60) for path in (old, new))
    assert torch.equal(a, b)
    verdict = judge(new, b, ids, torch.bfloat16)
    assert moved(new, tiny(tmp_path / "mistaken"), ids) > 20 * verdict.e0


def test_theta_inside_the_table_wins_over_one_beside_it(tmp_path):
    path = tiny(tmp_path, rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert ModelConfig.from_dir(path).rope.theta == 500000.0
    assert_rule_n(path)


def test_two_tables_that_differ_are_refused(tmp_path):
    tiny(tmp_path, rope_scaling=LLAMA3, rope_parameters={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match="rope_scaling and rope_parameters differ"):
        ModelConfig.from_dir(tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=LLAMA3)
    assert ModelConfig.from_dir(tmp_path).rope.type == "llama3"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables_are_exact_at_far_positions(device):
    """Angles formed in bfloat16 make 257 into 256 and 15962 into 15936."""
    cos, sin = rotary_tables(RopeConfig(), 32, 16384, torch.device(device))
    assert cos.dtype == sin.dtype == torch.float32
    cos, sin = cos.cpu(), sin.cpu()
    angles = torch.arange(16384, dtype=torch.float64)[:, None] * torch.tensor(plain(32), dtype=torch.float64)
    assert float((cos - angles.cos()).abs().max()) < 1e-6
    assert float((sin - angles.sin()).abs().max()) < 1e-6
    assert float(cos[256, 0]) == pytest.approx(-0.0398, abs=1e-4)
    assert float(cos[257, 0]) == pytest.approx(0.8193, abs=1e-4)


def test_tables_are_computed_in_parts_without_a_seam():
    cos, sin = rotary_tables(RopeConfig(), 8, TABLE_ROWS + 3, CPU)
    short = rotary_tables(RopeConfig(), 8, 3, CPU)
    assert torch.equal(cos[:3], short[0])
    angles = torch.tensor(float(TABLE_ROWS + 2), dtype=torch.float64) * torch.tensor(plain(8), dtype=torch.float64)
    torch.testing.assert_close(cos[-1], angles.cos().float())
    torch.testing.assert_close(sin[-1], angles.sin().float())


def test_a_model_in_bfloat16_keeps_its_tables_in_float32(tmp_path):
    decoder = open_model(tiny(tmp_path))
    assert decoder.dtype == torch.bfloat16
    assert decoder.layers[0].attention.cos.dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "ops"),
    [("cpu", "unfused"), *(pytest.param("cuda", ops, marks=pytest.mark.gpu) for ops in ("unfused", "fused"))],
)
def test_a_prompt_of_5000_ids_agrees(tmp_path, device, ops):
    """Positions or frequencies rounded to bfloat16 make far positions collapse together."""
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
    path = tiny(tmp_path, max_position_embeddings=16384, **few)
    ids = random_ids(5000)
    ours = play(open_model(path, max_len=5000, device=device), ids, prefill=4997, ops=ops)
    judge(path, ours, ids, torch.bfloat16)
