"""Hub ids against a stand-in server through HF_ENDPOINT: what is fetched, what is not, and how each failure is told."""

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoints import chain, edit_json, tiny, tok_b, write_json
from tests.models.hub import hub

ABC = {65: 66, 66: 67, 67: 256}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


MANY = """
import json, sys
from models.__main__ import run
from runtime.errors import QuartetError
for arguments in json.loads(sys.argv[1]):
    try:
        print(run(arguments))
    except QuartetError as error:
        print(f"error: {error}")
"""


@pytest.fixture
def place(tmp_path):
    """The stand-in, its folder, and `python(*arguments)`: exit code, stdout and stderr of a process with a cache of its own."""
    repositories = tmp_path / "repositories"
    tok_b(chain(repositories / "owner" / "small", ABC, shards=2))
    (repositories / "owner" / "small" / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (repositories / "owner" / "small" / "pytorch_model.bin").write_bytes(b"a pickle")
    with hub(repositories, gated={"owner/gated"}) as server:

        def python(*arguments, endpoint=server.url, **environment):
            known = {
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(tmp_path / "cache"),
                "HF_HUB_OFFLINE": "0",
                "no_proxy": "127.0.0.1",
            }
            done = subprocess.run(
                [sys.executable, *arguments],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, **known, **environment},
            )
            assert "Traceback" not in done.stderr, done.stderr
            return done.returncode, done.stdout, done.stderr

        yield server, repositories / "owner", python


def test_a_model_is_looked_at_by_its_headers_then_fetched_then_found_without_the_hub(place):
    server, owner, python = place
    code, out, err = python("-m", "models", "owner/small", "--revision", "main")
    assert code == 0, err
    assert "supported       yes" in out
    assert "chat templates  default" in out
    sizes = {shard: (owner / "small" / shard).stat().st_size for shard in SHARDS}
    assert all(0 < server.sent[shard] < size for shard, size in sizes.items())  # hub clients ask for the first 100 kB
    server.sent.clear()
    ask = ("-m", "runtime", "owner/small", "--prompt-ids", "65", "--max-len", "32", "--max-slots", "1")
    code, out, err = python(*ask)
    assert (code, out) == (0, "BC\n"), err
    assert "100%" in err  # progress is shown
    assert {shard: server.sent[shard] for shard in SHARDS} == sizes
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & server.sent.keys()
    assert python(*ask, endpoint="http://127.0.0.1:9")[:2] == (0, "BC\n")


def test_a_model_that_is_not_run_is_refused_before_its_weights_are_fetched(place):
    server, owner, python = place
    edit_json(tiny(owner / "quantized") / "config.json", quantization_config={"quant_method": "gptq"})
    code, out, err = python("-m", "runtime", "owner/quantized", "--prompt-ids", "1")
    assert (code, out) == (1, "")
    assert "quant_method 'gptq'" in err
    assert "model.safetensors" not in server.sent


def test_failures_are_one_line_with_the_remedy(place):
    _, owner, python = place
    tiny(owner / "gated")
    tiny(owner / "bin")
    (owner / "bin" / "model.safetensors").rename(owner / "bin" / "pytorch_model.bin")
    (owner / "adapter").mkdir()
    write_json(owner / "adapter" / "adapter_config.json", {"base_model_name_or_path": "owner/small"})
    away = (["owner/small"], "run `hf download owner/small` on a machine that is online")
    for environment, cases in (
        ({"endpoint": "http://127.0.0.1:9"}, [away]),
        ({"HF_HUB_OFFLINE": "1"}, [away]),
        (
            {},
            [
                (["owner/gated"], "accept its terms on https://huggingface.co/owner/gated, then run `hf auth login`"),
                (["owner/nothing"], "check the spelling, or run `hf auth login` if it is private"),
                (["owner/small", "--revision", "v9"], "has no revision 'v9'"),
                (["owner/bin"], "Quartet reads safetensors"),
                (["owner/adapter"], "merge it into its base"),
                (["own er/small"], "is neither a folder here nor a Hugging Face hub id"),
            ],
        ),
    ):
        code, out, err = python("-c", MANY, json.dumps([arguments for arguments, _ in cases]), **environment)
        said = [line for line in out.splitlines() if line != "1"]
        assert code == 0, err
        assert len(said) == len(cases), out
        for line, (_, words) in zip(said, cases, strict=True):
            assert line.startswith(("error: ", "supported       no: "))
            assert words in line
