"""Measures a load: a sharded folder of Llama-2-7B's shapes with random bfloat16 weights, read twice from the page cache.

    python -m tests.models.load_speed [FOLDER] [LAYERS]

Prints one JSON object a load: seconds of each part, GB/s, and the most host memory of the process beyond mapped files.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from models import find_model
from models.layout import allocate, pieces
from models.random_weights import SHAPES
from models.stored import INDEX
from models.weights import WeightFiles
from tests.checkpoints import write_json

SHARD_BYTES = 5 << 30


def make(folder: Path, layers: int) -> None:
    """Write the checkpoint, if it is not there."""
    if (folder / INDEX).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES["llama-2-7b"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": False,
    }
    write_json(folder / "config.json", config)
    noise = torch.randn(1 << 20).bfloat16()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for piece in pieces(find_model(str(folder), weights=False).config):
        count = torch.Size(piece.shape).numel()
        size += 2 * count
        if size > SHARD_BYTES:
            shards.append({})
            size = 2 * count
        shards[-1][piece.source] = noise.repeat(-(-count // len(noise)))[:count].view(piece.shape).clone()
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    write_json(folder / INDEX, {"weight_map": weight_map})


def host_mib() -> int:
    """Memory of this process that is not a mapped file, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem") if key in lines) >> 10


def load(folder: Path, device: torch.device) -> dict[str, float]:
    """One load, timed part by part; needs the device's context to be there."""
    peak, done = host_mib(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, host_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    files = WeightFiles.of_folder(folder)
    config, _ = files.settle(find_model(str(folder), weights=False).config)
    opened = time.perf_counter()
    targets = allocate(pieces(config), device, torch.bfloat16)
    allocated = time.perf_counter()
    files.copy_into(targets, pieces(config), lambda _: None)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    done.set()
    watcher.join()
    size = sum(target.nbytes for target in targets.values())
    return {
        "bytes": size,
        "headers_s": opened - begun,
        "allocate_s": allocated - opened,
        "copy_s": ended - allocated,
        "total_s": ended - begun,
        "gb_s": size / 1e9 / (ended - begun),
        "peak_host_mib": peak,
    }


def main() -> None:
    """Make the folder, touch its pages once so that they are in the cache, and load it twice."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/llama-2-7b-random")
    make(folder, int(sys.argv[2]) if len(sys.argv) > 2 else SHAPES["llama-2-7b"].num_layers)
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.empty(1, device=device)  # the context, which every door has made before it loads
    print(json.dumps({"device": str(device), "host_mib_before": host_mib()}), flush=True)
    for _ in range(2):
        print(json.dumps(load(folder, device)), flush=True)


if __name__ == "__main__":
    main()
