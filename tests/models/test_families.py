"""Each family as transformers itself saves it, against transformers: prefill and decode across every border, greedy text."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.check import forced_logits
from models import find_model, load_model
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import UnsupportedModelError
from runtime.request import Request
from tests.checkpoints import TINY
from tests.rule_n import hugging_face, judge, random_ids

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = {"sliding_window": 24}
FAMILIES = {
    "llama 2, vicuna, smollm2": ("llama", {}),
    "llama 3.1, 3.2, r1-distill": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "codellama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral v0.1": ("mistral", WINDOW),
    "mistral v0.2, v0.3": ("mistral", {"sliding_window": None}),
    "mistral nemo": ("mistral", {"sliding_window": None, "hidden_size": 160}),
    "ministral": ("ministral", WINDOW),
    "qwen2, qwen2.5": ("qwen2", {"hidden_size": 256, "head_dim": None}),
    "qwen2, every layer windowed": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, **WINDOW}),
    "qwen3": ("qwen3", {"hidden_size": 160, "tie_word_embeddings": True}),
    "seed-oss": ("seed_oss", {}),
    "phi-3": ("phi3", {"pad_token_id": 0, **WINDOW}),
}
ON_A_GPU = ("llama 3.1, 3.2, r1-distill", "mistral v0.1", "mistral nemo", "qwen2, qwen2.5", "qwen3", "seed-oss", "phi-3")
"""One of each set of traits: every shape has kernels to compile."""

COUNT, PREFILL, CHUNK = 140, 100, 33
"""Chunks end at 33, 66 and 99; decode passes a block of 128; the window of 24 moves in both."""


def save(path, name, dtype):
    """A random checkpoint, sharp enough that a mistake in rope or mask moves the logits, saved by transformers."""
    family, changes = FAMILIES[name]
    merged = {**TINY, **changes}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{key: value for key, value in merged.items() if value is not None})
    )
    if "sliding_window" in changes:
        model.config.sliding_window = changes["sliding_window"]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                is_table, is_bias = "embed" in key, weight.dim() == 1
                std = 1.0 if is_table else 0.5 if is_bias else 1.5 / weight.shape[-1] ** 0.5
                weight.normal_(std=std, generator=generator)
    model.to(dtype).save_pretrained(path)
    return path


def engine(path, dtype, config):
    made = Engine(load_model(find_model(str(path)), torch.device(config.device), dtype, COUNT), config)
    made.prepare()
    return made


def wish(dtype, device="cpu", ops="unfused", graph="off"):
    name = str(dtype).removeprefix("torch.")
    return EngineConfig(device, name, ops, graph, "off", max_len=COUNT, max_slots=1, prefill_chunk=CHUNK)


def holds(path, dtype, config):
    """Rule N, and in float32 the greedy text of 48 tokens."""
    made = engine(path, dtype, config)
    ids = random_ids(COUNT)
    (ours,) = forced_logits(made.modes.step_of(config.ops), config.graph == "on", ids, PREFILL, CHUNK)
    judge(path, ours, ids, dtype)
    if dtype == torch.float32:
        made = engine(path, dtype, config)
        prompt = random_ids(50, seed=2)
        said = made.generate([Request("a", tuple(prompt), max_tokens=48)])["a"]
        assert len(said) == 48
        assert hugging_face(path, prompt + said, dtype)[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_saved_by_transformers_agrees_with_it(tmp_path, name, dtype):
    holds(save(tmp_path, name, dtype), dtype, wish(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("ops", ["unfused", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_family_agrees_on_a_gpu_in_every_mode(tmp_path, name, dtype, ops, graph):
    holds(save(tmp_path, name, dtype), dtype, wish(dtype, "cuda", ops, graph))


OTHERS = ("olmo2", "olmo3", "gemma2", "gemma3_text", "granite", "smollm3", "glm", "cohere", "stablelm", "gpt_neox", "mixtral")


@pytest.mark.parametrize("name", [*OTHERS, "qwen3_moe", "qwen3_next", "jamba", "falcon_h1", "qwen2_vl", "llava", "mistral3"])
def test_another_family_is_refused_by_name_and_with_what_to_do(tmp_path, name):
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"model_type '{name}'.* is not supported; ") as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    for part, words in (("moe", "mixture of experts"), ("mixtral", "mixture"), ("llava", "tower"), ("next", "experts")):
        assert part not in name or words in str(caught.value)
