"""What a config.json says, what is refused and in which words, and the arithmetic of bytes."""

import pytest

from models.config import ModelConfig
from runtime.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import TINY, edit_json, tensor_shapes, tiny, write_json


def read(path, **config):
    return ModelConfig.from_dir(tiny(path, **config))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "model_type 'mixtral'"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "model_type 'qwen3_moe'"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "model_type 'gemma3'"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "llama", "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method 'awq'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads 3"),
        ({"num_attention_heads": 33, "num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quant_method 'compressed-tensors'"),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1]}}, "use its bfloat16 or float16 original"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"vision_config": {"hidden_size": 8}}, "give a text-only checkpoint"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "not all softmax attention"),
        ({"model_type": "mistral", "architectures": None, "layer_types": ["full_attention", "sliding_attention"]}, "mixes"),
    ],
    ids=str,
)
def test_what_quartet_does_not_run_is_refused_in_one_sentence_that_names_it(tmp_path, config, names):
    tiny(tmp_path)
    edit_json(tmp_path / "config.json", **config)
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_on_some_layers_are_refused(tmp_path, family):
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        read(tmp_path, family=family, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        read(
            tmp_path,
            family=family,
            use_sliding_window=True,
            sliding_window=64,
            layer_types=["full_attention", "sliding_attention"],
        )


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"hidden_size": "256"}, "hidden_size is '256'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"hidden_size": 255, "head_dim": None}, "hidden_size 255"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_kind_is_refused_by_file_and_field(tmp_path, config, names):
    tiny(tmp_path)
    edit_json(tmp_path / "config.json", **config)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        ModelConfig.from_dir(tmp_path)
    assert names in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_quantizers_own_file_tells_of_it_too(tmp_path, name):
    write_json(tiny(tmp_path) / name, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantized"):
        ModelConfig.from_dir(tmp_path)


def test_an_adapter_is_told_from_a_model(tmp_path):
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "owner/base"})
    with pytest.raises(UnsupportedModelError, match=r"is an adapter of 'owner/base', not a model; merge it"):
        ModelConfig.from_dir(tmp_path)


def test_an_older_spelling_of_the_architecture_is_known(tmp_path):
    assert read(tmp_path, architectures=["LLaMAForCausalLM"]).family == "llama"


def test_defaults_of_absent_keys_are_those_of_transformers(tmp_path):
    """Qwen3's head_dim was taken to be hidden_size over heads, and a window of null to be 4096."""
    assert read(tmp_path, family="qwen3", drop=["head_dim"]).head_dim == 128
    assert read(tmp_path, family="qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=None).window is None
    read(tmp_path)
    edit_json(tmp_path / "config.json", model_type="seed_oss", architectures=None, drop=["head_dim"])
    config = ModelConfig.from_dir(tmp_path)
    assert (config.head_dim, config.qkv_bias, config.o_bias) == (128, True, False)


def test_architectures_alone_tell_the_family(tmp_path):
    tiny(tmp_path, "qwen3")
    edit_json(tmp_path / "config.json", drop=["model_type"])
    assert ModelConfig.from_dir(tmp_path).qk_norm


def test_absent_or_null_kv_heads_are_as_many_as_query_heads(tmp_path):
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 8
    assert read(tmp_path, drop=["num_key_value_heads"]).num_kv_heads == 8


def test_families_differ_in_flags_alone(tmp_path):
    llama = read(tmp_path)
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.window, llama.tied) == (False, False, False, None, False)
    qwen2 = read(tmp_path, family="qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, family="qwen3", attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    assert read(tmp_path, family="mistral", sliding_window=64).window == 64
    assert read(tmp_path, family="mistral", sliding_window=None).window is None
    assert read(tmp_path, family="mistral").window == 4096  # as in transformers, where the key is absent


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "flags"),
    [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {"attention_bias": True})],
)
def test_parameters_are_those_of_the_stored_tensors(tmp_path, family, flags, tied):
    config = read(tmp_path, family=family, tie_word_embeddings=tied, **flags)
    shapes = tensor_shapes({**TINY, "model_type": family, **flags})
    if tied:
        del shapes["lm_head.weight"]
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    assert config.num_parameters == count
    assert config.weight_bytes("float16") == 2 * count
    assert config.weight_bytes("float32") == 4 * count


def test_bytes_read_per_token_leave_out_the_embedding_but_not_a_tied_head(tmp_path):
    config = read(tmp_path)
    table = config.vocab_size * config.hidden_size
    assert config.bytes_per_token("bfloat16") == 2 * (config.num_parameters - table)
    tied = read(tmp_path, tie_word_embeddings=True)
    assert tied.bytes_per_token("bfloat16") == config.bytes_per_token("bfloat16") == 2 * tied.num_parameters
    assert config.kv_bytes_per_position("bfloat16") == 2 * 2 * 2 * 32 * 2
    assert config.bytes_per_token("bfloat16", 100) == config.bytes_per_token("bfloat16") + 100 * 512
    windowed = read(tmp_path, family="mistral", sliding_window=64)
    assert windowed.bytes_per_token("bfloat16", 100) == windowed.bytes_per_token("bfloat16") + 64 * 512
