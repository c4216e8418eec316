"""Mutated checkpoints, one after another in a process of its own: each must load right, as transformers loads it, or be refused
with one sentence. Prints one JSON object a kind: how many loaded, how many were refused, and what was neither.

    python -m tests.models.fuzz config 2000 header 500
"""

import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from models import find_model, load_model
from runtime.errors import QuartetError
from tests.checkpoints import TINY, tiny, tok_b, write_json
from tests.rule_n import hugging_face, play, random_ids

SECONDS = 5
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 320}
VALUES: list[Any] = [
    *(None, 0, 1, -1, 2, 3, 7, 8, 64, 2**31, 2**63, 10**40, 0.5, 1.5, 1e-300, 1e300, -0.0, math.nan, math.inf, True, False),
    *("", "x", "4", "../../etc/passwd", "/etc/passwd", "silu", "linear", "a\nb", "\ud800", "x" * 10_000, [], {}, [1], [[]]),
    *({"factor": 2}, {"rope_type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 4.0}, {"rope_type": "default"}),
    *(["full_attention"] * 2, ["sliding_attention", "full_attention"], {"rope_type": "llama3"}, {"quant_method": "awq"}),
]
KEYS = [*TINY, "model_type", "architectures", "dtype", "torch_dtype", "rope_scaling", "rope_parameters", "sliding_window"]
KEYS += ["use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "mlp_bias", "partial_rotary_factor"]
KEYS += ["quantization_config", "num_experts", "auto_map", "original_max_position_embeddings"]


def changed(data: dict[str, Any], keys: list[str], draw: random.Random) -> dict[str, Any]:
    """An object with one to three of its fields dropped, replaced or nudged; rarely deep inside."""
    data = dict(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        key, kind = draw.choice(keys), draw.random()
        value = data.get(key)
        if kind < 0.2:
            data.pop(key, None)
        elif kind < 0.4 and type(value) in (int, float):
            data[key] = draw.choice((value * 2, value + 1, value - 1, value // 2, -value, float(value), str(value), [value]))
        elif isinstance(value, dict) and value and kind < 0.7:
            data[key] = changed(value, list(value), draw)
        else:
            data[key] = draw.choice(VALUES)
    return data


def spoiled(content: bytes, draw: random.Random) -> bytes:
    """Bytes cut, flipped or doubled somewhere."""
    at = draw.randrange(len(content))
    return draw.choice(
        (
            content[:at],
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at // 2 : at] + content[at:],
            content[:at] + b"[" * 5000 + content[at:],
        )
    )


def mutate_config(path: Path, draw: random.Random) -> None:
    """Change one of the folder's JSON files."""
    name = draw.choice(
        ["config.json"] * 7 + ["generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
    )
    content = (path / name).read_bytes()
    if draw.random() < 0.1:
        (path / name).write_bytes(spoiled(content, draw))
        return
    data = json.loads(content)
    if name.endswith("index.json"):
        data["weight_map"] = changed(data["weight_map"], list(data["weight_map"]), draw)
    elif name == "config.json":
        data = changed(data, KEYS, draw)
    else:
        data = changed(data, [*data, "temperature", "top_k", "top_p", "do_sample", "eos_token_id", "chat_template"], draw)
    write_json(path / name, data)


def mutate_header(path: Path, draw: random.Random) -> None:
    """Change the header of the first shard, or the number in front of it."""
    file = path / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + size], content[8 + size :]
    kind = draw.random()
    if kind < 0.2:
        header = spoiled(header, draw)
    elif kind < 0.8:
        data = json.loads(header)
        name = draw.choice(list(data))
        if draw.random() < 0.3:
            data[draw.choice((draw.choice(list(data)), "x", "", "__metadata__"))] = data.pop(name)
        elif "shape" in data[name]:
            info = data[name] = changed(data[name], ["dtype", "shape", "data_offsets"], draw)
            if isinstance(info.get("shape"), list) and draw.random() < 0.3:
                info["shape"] = draw.choice((info["shape"][::-1], [*info["shape"], 1], [2**32, 2**32], [-1], []))
            if isinstance(info.get("data_offsets"), list) and draw.random() < 0.3:
                info["data_offsets"] = [draw.choice((0, 1, 64, 8192, 2**62, -1)) for _ in info["data_offsets"]]
        header = json.dumps(data).encode()
    length = len(header) if kind < 0.9 else draw.choice((0, 1, len(header) + 1, 2**40, 2**63 - 1, 2**64 - 1))
    file.write_bytes(struct.pack("<Q", length) + header + rest[: draw.choice((None, None, None, 0, len(rest) - 1))])


def outcome(path: Path, ids: list[int]) -> str:
    """Load a folder and hold its logits against transformers': "loaded", "refused", or what is wrong."""
    signal.alarm(SECONDS)
    try:
        source = find_model(str(path))
        ours = play(load_model(source, torch.device("cpu"), torch.float32, len(ids)), ids, prefill=8)
    except QuartetError as error:
        said = str(error)
        return "refused" if said and "\n" not in said and len(said) < 2000 else f"refused in these words: {said[:300]!r}"
    signal.alarm(0)
    if max(ids) >= source.config.vocab_size:
        return "loaded"
    try:
        theirs = hugging_face(path, ids, torch.float32)
    except Exception:  # what transformers does not load cannot judge
        return "loaded, by us alone"
    scale = max(1.0, float(theirs.nan_to_num().abs().max()))
    return "loaded" if torch.allclose(ours, theirs, rtol=0, atol=1e-3 * scale, equal_nan=True) else "loaded other logits"


def main(kind: str, count: int, seed: int = 0) -> None:
    """Play `count` mutations of a kind."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    mutate: Callable[[Path, random.Random], None] = {"config": mutate_config, "header": mutate_header}[kind]
    allowed: tuple[str, ...] = (
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_paths()["stdlib"],
        os.getcwd(),
        "/proc",
        "/sys",
        "/dev",
    )
    outside: set[str] = set()
    watching = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes):
            name = os.path.abspath(os.fsdecode(arguments[0]))
            if not name.startswith(allowed):
                outside.add(name)

    def late(*_: object) -> None:
        raise TimeoutError

    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, late)
    counts: Counter[str] = Counter()
    wrong = []
    ids = random_ids(12, vocab_size=256)
    with tempfile.TemporaryDirectory() as folder:
        allowed += (folder,)
        root = Path(folder)
        assert outcome(tiny(root / "sound", dtype=torch.float32, **SHAPE), ids) == "loaded"  # and all is imported
        for family in FAMILIES:
            tok_b(tiny(root / family, family, dtype=torch.float32, shards=2, **SHAPE, eos_token_id=256))
            write_json(root / family / "generation_config.json", {"eos_token_id": 256, "temperature": 0.7, "top_k": 20})
        for index in range(count):
            draw = random.Random(f"{seed} {kind} {index}")
            path, family = root / "model", draw.choice(FAMILIES)
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(root / family, path)
            mutate(path, draw)
            watching = True
            try:
                found = outcome(path, ids)
            except Exception as error:
                found = f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                signal.alarm(0)
            watching = False
            counts[found if found in ("loaded", "refused", "loaded, by us alone") else "wrong"] += 1
            if not found.startswith(("loaded", "refused")) or "other" in found or "words" in found:
                wrong.append(f"{kind} {index} ({family}): {found}")
    status = Path("/proc/self/status").read_text()  # getrusage would count what the parent held when it forked
    peak = int(status.split("VmHWM:")[1].split()[0]) >> 10
    print(json.dumps({**counts, "wrong": wrong, "outside": sorted(outside), "peak_mib": peak}))


if __name__ == "__main__":
    for kind, count in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(kind, int(count))
