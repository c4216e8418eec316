"""What MODEL may name, how a wrong one is answered, and which ids end an answer."""

import pytest
import torch

from models import find_model, load_engine, load_tokenizer
from models.source import end_ids
from runtime.config import EngineConfig
from runtime.errors import CheckpointError, ConfigError, OutOfMemoryError, RequestError
from runtime.kv_cache import RESERVE_BYTES
from runtime.request import Request
from tests.checkpoints import chain, edit_json, tiny, tok_b, write_json

ABC = {65: 66, 66: 258, 258: 67, 67: 67}


def answer(path, max_tokens=6, ignore_eos=False):
    loaded = load_engine(find_model(str(path)), EngineConfig(max_len=32, max_slots=1))
    ends = () if ignore_eos else loaded.source.end_ids
    return loaded.engine.generate([Request("a", (65,), max_tokens=max_tokens, end_ids=ends)])["a"]


# Which ids end an answer


def test_end_ids_of_the_config_and_the_generation_config_are_joined(tmp_path):
    path = tok_b(chain(tmp_path, ABC, eos_token_id=256))
    write_json(path / "generation_config.json", {"eos_token_id": [256, 258]})
    assert find_model(str(path)).end_ids == (256, 258)
    assert answer(path) == [66, 258]
    assert answer(path, ignore_eos=True) == [66, 258, 67, 67, 67, 67]


def test_the_end_token_of_the_tokenizer_is_one_too(tmp_path):
    """An instruct model whose config knows only the base model's end runs on to max_tokens."""
    path = tok_b(chain(tmp_path, ABC, eos_token_id=None), eos_token="<|im_end|>")
    write_json(path / "generation_config.json", {"eos_token_id": 256})
    assert find_model(str(path)).end_ids == (256, 258)
    assert answer(path) == [66, 258]


def test_a_list_in_the_config_is_understood(tmp_path):
    path = chain(tmp_path, ABC, eos_token_id=[256, 258])
    assert find_model(str(path)).end_ids == (256, 258)
    assert answer(tok_b(path)) == [66, 258]


def test_a_model_without_any_end_runs_to_its_limit(tmp_path):
    path = chain(tmp_path, ABC, eos_token_id=None)
    assert find_model(str(path)).end_ids == ()
    assert answer(tok_b(path, eos_token=None)) == [66, 258, 67, 67, 67, 67]


def test_more_end_ids_than_a_request_can_have_are_cut_and_told(tmp_path, caplog):
    """Every request was refused, for end ids that it had not named."""
    path = tok_b(tiny(tmp_path, eos_token_id=list(range(20))), eos_token=None)
    assert find_model(str(path)).end_ids == tuple(range(16))
    assert "of 20 end ids the first 16 end an answer" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, (258,)),
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, (258,)),
        ({"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}}, (2,)),
        ({"eos_token": "a"}, (97,)),
        ({"eos_token": "nowhere"}, ()),
        ({"eos_token": None}, ()),
    ],
    ids=str,
)
def test_the_tokenizers_end_token_is_found_however_it_is_spelled(tmp_path, settings, expected):
    path = tok_b(chain(tmp_path, ABC, eos_token_id=None))
    write_json(path / "tokenizer_config.json", settings)
    assert end_ids(path, 320) == expected


def test_end_ids_outside_the_vocabulary_are_left_out_and_named(tmp_path, caplog):
    path = chain(tmp_path, ABC, eos_token_id=[256, 5000, -1])
    assert find_model(str(path)).end_ids == (256,)
    assert "[5000, -1]" in caplog.text


@pytest.mark.parametrize("value", ["256", [256, "x"], 1.5, True])
def test_end_ids_of_a_wrong_type_are_refused(tmp_path, value):
    chain(tmp_path, ABC, eos_token_id=value)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        find_model(str(tmp_path))


# What generation_config.json asks for


@pytest.mark.parametrize(
    ("wishes", "taken"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
        ),
        ({"do_sample": True, "temperature": 1, "repetition_penalty": 1.5}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": -1, "top_k": 2.5, "top_p": "1", "min_p": None}, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_sampling_values_are_taken_where_they_are_sound(tmp_path, wishes, taken):
    write_json(tiny(tmp_path) / "generation_config.json", wishes)
    assert find_model(str(tmp_path)).sampling == taken


# Names


@pytest.mark.parametrize("name", ["", "./nothing", "/nothing/here", "~/nothing-here", "a/b/c", "nothing.gguf"])
def test_a_name_that_can_only_be_a_path_asks_no_network(name, monkeypatch):
    monkeypatch.setattr("models.source._from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="is no folder or file"):
        find_model(name)


def test_a_file_is_refused(tmp_path):
    tiny(tmp_path)
    with pytest.raises(CheckpointError, match="give the folder"):
        find_model(str(tmp_path / "model.safetensors"))


def test_a_revision_belongs_to_the_hub(tmp_path):
    with pytest.raises(ConfigError, match="--revision"):
        find_model(str(tiny(tmp_path)), revision="main")


def test_an_unknown_random_model_is_answered_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"random:gpt-2 is unknown; random models: llama-2-7b, llama-3\.1-8b"):
        find_model("random:gpt-2")


@pytest.mark.parametrize("name", ["dmeo", "Demo", "demos"])
def test_a_slip_of_demo_is_told_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr("models.source._from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=r"did you mean demo\?"):
        find_model(name)


# From a name to an engine


def test_a_missing_tokenizer_is_an_error_and_nothing_takes_its_place(tmp_path):
    tiny(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(find_model(str(tmp_path)))


def test_a_damaged_tokenizer_is_an_error(tmp_path):
    (tok_b(tiny(tmp_path)) / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(find_model(str(tmp_path)))


def test_a_bfloat16_model_that_overflows_float16_ends_with_an_error_and_not_with_token_0(tmp_path):
    def scale(tensors):
        for name in tensors:
            if name.endswith("down_proj.weight"):
                tensors[name] *= 1e5

    path = tok_b(tiny(tmp_path, edit=scale))
    request = Request("a", (65, 66, 67), max_tokens=4)
    fine = load_engine(find_model(str(path)), EngineConfig(max_len=32))
    assert fine.config.dtype == "bfloat16"
    assert len(fine.engine.generate([request])["a"]) == 4
    forced = load_engine(find_model(str(path)), EngineConfig(max_len=32, dtype="float16"))
    with pytest.raises(RequestError, match="not finite"):
        forced.engine.generate([request])


def test_random_weights_take_the_shapes_and_lift_the_limit(tmp_path):
    path = tiny(tmp_path, max_position_embeddings=64)
    (path / "model.safetensors").unlink()
    source = find_model(str(path), random_weights=True)
    assert load_tokenizer(source) is None
    loaded = load_engine(source, EngineConfig(max_slots=1), needed_len=200)
    assert loaded.config.max_len == 200
    assert loaded.source.note == "random weights, seed 0"
    assert loaded.notes[0] == "random weights, seed 0"
    again = load_engine(source, EngineConfig(max_slots=1), needed_len=200)
    requests = [Request("a", tuple(range(100)), max_tokens=20)]
    assert loaded.engine.generate(requests) == again.engine.generate(requests)
    norm = loaded.engine.model.norm
    assert 0.5 <= float(norm.min()) < 0.7 < 1.3 < float(norm.max()) <= 1.5
    assert float(loaded.engine.model.layers[0].down_proj.weight.float().std()) == pytest.approx(1.5 / 344**0.5, rel=0.02)
    assert float(loaded.engine.model.embedding.float().std()) == pytest.approx(1, rel=0.02)


def test_a_capacity_below_what_the_command_needs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="100 positions are needed and max_len is 50"):
        load_engine(find_model(str(tok_b(tiny(tmp_path)))), EngineConfig(max_len=50), needed_len=100)


def test_what_does_not_fit_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("models.load.free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("models.load.load_model", lambda *_: pytest.fail("read weights"))
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        load_engine(find_model(str(tok_b(tiny(tmp_path)))), EngineConfig())


def test_slots_give_way_where_memory_is_short_and_max_len_is_left_open(tmp_path, monkeypatch):
    path = tok_b(tiny(tmp_path, max_position_embeddings=8192))
    position = find_model(str(path)).config.kv_bytes_per_position("bfloat16")
    room = find_model(str(path)).config.weight_bytes("bfloat16") + RESERVE_BYTES + 3 * 4200 * position
    monkeypatch.setattr("models.load.free_bytes", lambda device: room)
    loaded = load_engine(find_model(str(path)), EngineConfig())
    assert loaded.config.max_slots == 3
    assert 3500 < loaded.config.max_len < 4200
    assert "in each of 3 slots: cut from the model's 8192; 8 slots of 4096 positions do not fit" in "\n".join(loaded.notes)
    with pytest.raises(OutOfMemoryError, match="at most"):
        load_engine(find_model(str(path)), EngineConfig(max_len=4096))


def test_a_long_silence_is_announced_where_there_is_no_progress_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("models.load.QUIET_BYTES", 1000)
    load_engine(find_model(str(tiny(tmp_path)), random_weights=True), EngineConfig(max_len=32))
    assert "making " in capsys.readouterr().err


def test_notes_tell_what_was_settled(tmp_path):
    loaded = load_engine(find_model(str(tok_b(tiny(tmp_path)))), EngineConfig(max_len=32, max_slots=2))
    text = "\n".join(loaded.notes)
    assert "dtype bfloat16: as stored in the checkpoint" in text
    assert "context 32 positions in each of 2 slots: cut from the model's 512" in text
    assert loaded.weight_bytes == loaded.source.config.weight_bytes("bfloat16")
    assert loaded.engine.model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738415616),
        ("llama-3.1-8b", 8.030261248),
        ("mistral-7b", 7.248023552),
        ("mistral-7b-v0.1", 7.241732096),
        ("qwen2.5-7b", 7.615616512),
        ("qwen3-8b", 8.190735360),
    ],
)
def test_random_models_have_the_public_parameter_counts(name, billions):
    config = find_model(f"random:{name}").config
    assert config.num_parameters == round(billions * 1e9)
    assert config.max_position is None


def test_a_config_edit_is_seen(tmp_path):
    edit_json(tiny(tmp_path) / "config.json", max_position_embeddings=77)
    assert find_model(str(tmp_path)).config.max_position == 77
