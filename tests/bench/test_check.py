"""`bench check`: the file it writes, the verdict it gives, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file

from bench import check, hugging_face
from models import ModelConfig, find_model, load_engine, random_weights
from runtime.__main__ import run as runtime_door
from runtime.config import EngineConfig
from runtime.errors import ConfigError, RequestError
from tests.checkpoints import ARCHITECTURES, tiny, tok_b

IDS = [(37 * i + 11) % 512 for i in range(40)]


@pytest.fixture
def ids_file(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(IDS))
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_agrees_with_transformers(bench, folders, ids_file, family, dtype):
    words = ("check", "--model", folders[family], "--ids", ids_file, "--prefill", 15, "--dtype", dtype, "--rows", 3)
    printed = bench(*words, "--prefill-chunk", 6, "--against", "transformers")
    print(printed.out.splitlines()[-2])
    assert printed.code == 0
    assert printed.result["passed"] is True
    assert set(printed.result["rule_n"]) == {"logits.unfused.off", "logits.unfused.off.last"}
    verdict = printed.result["rule_n"]["logits.unfused.off"]
    assert verdict["positions"] == len(verdict["errors"]) == len(IDS)
    assert verdict["float32"] is (dtype == "float32")


def test_a_disagreement_is_exit_code_1(bench, folders, monkeypatch):
    played = check.forced_logits
    monkeypatch.setattr(check, "forced_logits", lambda *args: [logits.roll(1, dims=0) for logits in played(*args)])
    printed = bench("check", "--model", folders["llama"], "--against", "transformers")
    assert printed.code == 1
    assert "rule N FAIL" in printed.out
    assert printed.result["passed"] is False


def test_the_file_holds_one_float32_tensor_for_each_combination(bench, folders, ids_file, tmp_path):
    out = tmp_path / "out.safetensors"
    printed = bench("check", "--model", folders["llama"], "--ids", ids_file, "--prefill", 40, "--logits", out)
    tensors = load_file(out)
    assert printed.code == 0
    assert list(tensors) == printed.result["logits"] == ["logits.unfused.off"]
    assert tensors["logits.unfused.off"].shape == (40, 512)
    assert tensors["logits.unfused.off"].dtype == torch.float32
    assert printed.result["greedy"]["logits.unfused.off"] == tensors["logits.unfused.off"].argmax(dim=1).tolist()
    assert printed.result["passed"] is None


def test_logits_that_cannot_be_written_are_told_and_a_link_stays_one(bench, folders, tmp_path):
    """A full disk was a traceback; what --logits named was replaced by a new file, even /dev/full."""
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="full cannot be written: No space left on device"):
        bench("check", "--model", folders["llama"], "--prompt-ids", "5,7", "--logits", tmp_path / "full")
    assert (tmp_path / "full").is_char_device()
    (tmp_path / "full").unlink()


def test_prefill_and_decode_give_the_same_logits(bench, folders, ids_file, tmp_path):
    logits = []
    for prefill in (0, 1, 40):
        out = tmp_path / f"{prefill}.safetensors"
        words = ("check", "--model", folders["qwen3"], "--ids", ids_file, "--dtype", "float32", "--rows", 4)
        bench(*words, "--prefill", prefill, "--logits", out)
        logits += load_file(out).values()
    difference = max(float((each - logits[0]).abs().max()) for each in logits)
    print(f"largest difference {difference:.2e}")
    assert difference < 1e-3


def test_words_for_the_same_combination_are_played_once(bench, folders, tmp_path):
    out = tmp_path / "out.safetensors"
    words = ("--ops", "auto,unfused", "--graph", "off,auto", "--logits", out)
    assert bench("check", "--model", folders["llama"], *words).result["logits"] == ["logits.unfused.off"]


def test_without_a_tokenizer_ids_are_drawn_the_same_every_time_and_said_to_be(bench, tmp_path):
    """Such a folder was refused for the tokenizer that the command has no use for."""
    folder = tiny(tmp_path / "bare")
    runs = [bench("check", "--model", folder, "--logits", tmp_path / "out.safetensors") for _ in range(2)]
    assert runs[0].result["ids"] == runs[1].result["ids"]
    assert len(runs[0].result["ids"]) == 64
    assert "drawn from the vocabulary with seed 0" in runs[0].out
    given = bench("check", "--model", folder, "--prompt-ids", "5,5,7", "--logits", tmp_path / "out.safetensors")
    assert given.result["ids"] == [5, 5, 7]
    assert runtime_door([str(folder), "--prompt-ids", "5,7", "--max-tokens", "2", "--device", "cpu"]) == 0


def test_ids_are_of_a_real_text_where_there_is_a_tokenizer(bench, folders, tmp_path):
    printed = bench("check", "--model", folders["llama"], "--logits", tmp_path / "out.safetensors")
    assert bytes(printed.result["ids"]).decode() == check.TEXT[:64]
    assert "64 ids of a short English text" in printed.out


@pytest.mark.model
def test_the_demos_own_ids_decide_positions(bench):
    """Of ids that were drawn it was sure nowhere, so half of the rule judged nothing."""
    printed = bench("check", "--model", "demo", "--against", "transformers")
    verdict = printed.result["rule_n"]["logits.unfused.off"]
    print(verdict["decided"], "decided")
    assert printed.code == 0
    assert verdict["decided"] >= 5


def test_a_context_shorter_than_64_gets_as_many_ids_as_it_holds(bench, tmp_path):
    folder = tok_b(tiny(tmp_path / "short", max_position_embeddings=16))
    assert len(bench("check", "--model", folder, "--logits", tmp_path / "o.safetensors").result["ids"]) == 16


@pytest.mark.parametrize("text", ["{}", "[]", "[1, 2.5]", "[true]", '["a"]', "[1", "[[1]]"])
def test_a_file_without_a_list_of_ids_is_refused(bench, folders, tmp_path, text):
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(RequestError, match="JSON list of token ids"):
        bench("check", "--model", folders["llama"], "--ids", path, "--logits", tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ids", "none.json"), "none.json"),
        (("--prefill", 65), "--prefill is 65; allowed: 0 to the number of ids, 64"),
        (("--ops", "unfused,fused"), "fused kernels run only on a CUDA device"),
        (("--graph", "on,off"), "graphs are captured only on a CUDA device"),
        (("--max-len", 20), "64 positions are needed and max_len is 20"),
        (("--rows", 4, "--max-slots", 2), "--max-slots is 2 and 4 rows are to be played"),
        (("--logits", "no/such/folder/out.safetensors"), "the folder does not exist"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(bench, folders, tmp_path, words, message):
    with pytest.raises((ConfigError, RequestError), match=message):
        bench("check", "--model", folders["llama"], "--logits", tmp_path / "out.safetensors", *words)


def test_an_id_outside_the_vocabulary_is_refused(bench, folders, tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[511, 512]")
    with pytest.raises(RequestError, match="token id 512 is outside the vocabulary of 0 to 511"):
        bench("check", "--model", folders["llama"], "--ids", path, "--against", "transformers")


def test_random_models_are_judged_over_the_weights_they_have(bench, monkeypatch):
    shape = ModelConfig("qwen3", 96, 64, 80, 2, 4, 2, 16, 128, qk_norm=True)
    monkeypatch.setitem(random_weights.SHAPES, "tiny", shape)
    printed = bench("check", "--model", "random:tiny", "--dtype", "bfloat16", "--against", "transformers")
    assert printed.code == 0
    assert "transformers over our weights" in printed.out
    assert "random weights, seed 0" in printed.out


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_weights_of_few_bits_are_judged_over_what_they_hold(bench, tmp_path, weights):
    folder = tok_b(tiny(tmp_path / "wide", "llama", hidden_size=128, intermediate_size=256))
    printed = bench("check", "--model", folder, "--weights", weights, "--against", "transformers")
    assert printed.code == 0
    assert printed.result["environment"]["weights"] == weights
    assert "transformers over our weights" in printed.out


def test_with_json_asked_for_it_is_all_there_is(bench, folders):
    printed = bench("check", "--model", folders["llama"], "--against", "transformers", "-o", "json")
    assert printed.out.count("\n") == 1
    assert printed.result["bench"] == "check"
    assert "rule N pass" in printed.err


def test_nothing_to_write_and_nothing_to_judge_is_said(bench, folders):
    with pytest.raises(ConfigError, match="nothing to do"):
        bench("check", "--model", folders["llama"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_transformers_plays_over_our_weights_without_a_copy(tmp_path, family, tied):
    """Models without a folder (random weights) are judged so; the config is built from ours and the weights are views."""
    folder = tok_b(tiny(tmp_path / "m", family, tie_word_embeddings=tied, dtype=torch.float32))
    model = load_engine(find_model(str(folder)), EngineConfig(device="cpu", max_len=64)).engine.model
    read = hugging_face.read_folder(folder, torch.float32, torch.device("cpu"))
    ids = torch.tensor([IDS])
    for path, attention in ((None, "eager"), (folder, "sdpa")):
        hf = hugging_face.around(model, path, torch.float32, attention)
        assert hf.model.embed_tokens.weight.data_ptr() == model.embedding.data_ptr()
        assert hf.model.layers[1].mlp.gate_proj.weight.data_ptr() == model.layers[1].gate_up_proj.weight.data_ptr()
        with torch.inference_mode():
            assert (hf(input_ids=ids).logits - read(input_ids=ids).logits).abs().max() < 1e-3
    assert hugging_face.around(model, None, torch.bfloat16, "eager").dtype == torch.bfloat16
