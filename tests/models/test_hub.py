"""Hub ids against a stand-in server through HF_ENDPOINT: what is fetched, what is not, and how each failure is told."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from models import find_model
from runtime.errors import CheckpointError
from tests.checkpoints import chain, edit_json, tiny, tok_b, write_json
from tests.models.hub import hub

ABC = {65: 66, 66: 67, 67: 256}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ASK = ["--prompt-ids", "65", "--max-len", "32", "--max-slots", "1"]
AWAY = "run `hf download owner/gated` on a machine that is online"

DOORS = """
import importlib, json, sys
from runtime.errors import QuartetError
for door, *arguments in json.loads(sys.argv[1]):
    try:
        print("exit code", importlib.import_module(f"{door}.__main__").run(arguments))
    except QuartetError as error:
        print("exit code 1 error:", error)
"""
"""Plays doors one after another in one process: a process takes seconds to import what it needs."""

LOOK_AND_RUN = [["models", "owner/small", "--revision", "main"], ["runtime", "owner/small", *ASK]]
FAILURES = [
    (["models", "owner/gated"], "accept its terms on https://huggingface.co/owner/gated, then run `hf auth login`"),
    (["models", "owner/nothing"], "check the spelling, or run `hf auth login` if it is private"),
    (["models", "owner/small", "--revision", "v9"], "has no revision 'v9'"),
    (["models", "owner/bin"], "Quartet reads safetensors"),
    (["models", "owner/adapter"], "merge it into its base"),
    (["models", "own er/small"], "is neither a folder here nor a Hugging Face hub id"),
    (["runtime", "owner/quantized", *ASK], "quant_method 'gptq'"),
    (["runtime", "owner/bin", *ASK], "has no weights"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The stand-in, its folder, and `play(doors)`: stdout and stderr of a process with a cache of its own."""
    tmp_path = tmp_path_factory.mktemp("hub")
    owner = tmp_path / "repositories" / "owner"
    tok_b(chain(owner / "small", ABC, shards=2))
    (owner / "small" / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (owner / "small" / "pytorch_model.bin").write_bytes(b"a pickle")
    tiny(owner / "gated")
    tiny(owner / "bin")
    (owner / "bin" / "model.safetensors").rename(owner / "bin" / "pytorch_model.bin")
    (owner / "adapter").mkdir()
    write_json(owner / "adapter" / "adapter_config.json", {"base_model_name_or_path": "owner/small"})
    edit_json(tiny(owner / "quantized") / "config.json", quantization_config={"quant_method": "gptq"})
    with hub(owner.parent, gated={"owner/gated"}) as server:

        def play(doors, endpoint=server.url):
            known = {
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(tmp_path / "cache"),
                "HF_HUB_OFFLINE": "0",
                "no_proxy": "127.0.0.1",
            }
            command = [sys.executable, "-c", DOORS, json.dumps(doors)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
                env={**os.environ, **known},
            )
            assert done.returncode == 0, done.stderr
            return done.stdout, done.stderr

        yield server, owner, play


@pytest.fixture(scope="module")
def online(place):
    """What the doors say that find the hub."""
    _, _, play = place
    out, err = play([*LOOK_AND_RUN, *(door for door, _ in FAILURES)])
    found, answered, refused = out.partition("BC\nexit code 0\n")
    return found + answered, refused, err


def test_a_model_is_looked_at_by_its_headers_then_fetched_then_found_without_the_hub(place, online):
    server, owner, play = place
    out, _, err = online
    assert out.endswith("supported       yes\nexit code 0\nBC\nexit code 0\n")
    assert "chat templates  default" in out
    assert "100%" in err  # progress is shown
    for shard in SHARDS:
        size = (owner / "small" / shard).stat().st_size
        header, *whole = server.sent[shard]
        assert 0 < header < size  # the hub's client asks for the first 100 kB
        assert whole == [size]
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & server.sent.keys()
    out, _ = play([["runtime", "owner/small", *ASK], ["models", "owner/gated"]], endpoint="http://127.0.0.1:9")
    assert out.startswith("BC\nexit code 0\nexit code 1 error: ")
    assert AWAY in out


def test_failures_are_one_line_with_the_remedy(place, online):
    server, _, _ = place
    _, out, _ = online
    said = [line for line in out.splitlines() if line != "exit code 1"]
    assert len(said) == len(FAILURES), out
    for line, (_, words) in zip(said, FAILURES, strict=True):
        assert line.startswith(("exit code 1 error: ", "supported       no: "))
        assert words in line
    assert "model.safetensors" not in server.sent  # refused before the weights were fetched
    assert "pytorch_model.bin" not in server.sent


def test_offline_mode_is_told_with_the_remedy(monkeypatch):
    def offline(*_, **__):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr("models.source.snapshot_download", offline)
    with pytest.raises(CheckpointError, match="a machine that is online and without HF_HUB_OFFLINE, or give a local folder"):
        find_model("owner/gated")
