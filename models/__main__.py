"""The door `python -m models`: what a checkpoint is, and whether Quartet runs it. Loads no weights, nor fetches them."""

import os
import signal
import sys

# `python -m` puts the current folder first: one that holds a `runtime` of its own must not take the place of ours.
if __name__ == "__main__" and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]
# The imports take seconds; Ctrl-C meanwhile should end the process, not show where in torch it was.
_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
from collections.abc import Sequence

from models.config import ARCHITECTURES, ModelConfig
from models.source import ModelSource, find_model
from models.tokenizer import template_names
from runtime.__main__ import run_door, typed_name
from runtime.config import DTYPES
from runtime.errors import UnsupportedModelError

signal.signal(signal.SIGINT, _interrupt)


def describe(source: ModelSource, dtype: str) -> dict[str, str]:
    """What each line says, by its name; bytes are counted in `dtype`."""
    config = source.config
    read = config.bytes_per_token(dtype, weights=config.weights)
    lines = {
        "model": source.label if source.note is None else f"{source.label} ({source.note})",
        "family": f"{config.family} ({ARCHITECTURES[config.family]})",
        "shapes": f"L {config.num_layers} layers, C {config.hidden_size} hidden, H {config.num_heads} heads, "
        f"K {config.num_kv_heads} kv heads, D {config.head_dim} head dim, F {config.intermediate_size} MLP, "
        f"V {config.vocab_size} vocabulary",
        "traits": _traits(config),
        "context": "no limit" if config.max_position is None else f"{config.max_position:,} positions",
        "dtype": dtype if dtype == config.dtype else f"{dtype}; stored as {config.dtype}",
        "parameters": f"{config.num_parameters:,}",
        "weights": f"{config.weight_bytes(dtype, config.weights):,} bytes{_stored(config)}",
        "read per token": f"{read:,} bytes of weights, and K and V of the context",
        "KV cache": f"{config.kv_bytes_per_position(dtype):,} bytes per position",
    }
    if source.end_ids:
        lines["end ids"] = ", ".join(map(str, source.end_ids))
    if source.sampling:
        asked = ", ".join(f"{name} {value:g}" for name, value in source.sampling.items())
        lines["sampling"] = f"{asked} (generation_config.json; a server's defaults)"
    if source.folder is not None:
        lines["chat templates"] = ", ".join(template_names(source.folder)) or "none"
    return lines


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and print the lines; 1 where the model is not supported."""
    about = "Look at a checkpoint: family, shapes, bytes, and whether it is supported (exit code 1 if not). Loads no weights."
    flags = argparse.ArgumentParser(prog=typed_name("models"), description=about)
    flags.add_argument(
        "model", metavar="MODEL", help="`demo`, a folder, a .gguf file, a Hugging Face hub id, or random:<shape>"
    )
    flags.add_argument("--revision", help="branch, tag or commit of a hub id")
    flags.add_argument("--dtype", choices=DTYPES, default="auto", help="count bytes in this type; auto: as stored")
    args = flags.parse_args(argv)
    try:
        source = find_model(args.model, args.revision, fetch=False)
    except UnsupportedModelError as error:
        print(f"{'supported':<15} no: {error}")
        return 1
    for name, value in describe(source, source.config.dtype if args.dtype == "auto" else args.dtype).items():
        print(f"{name:<15} {value}")
    print(f"{'supported':<15} yes")
    return 0


def main() -> None:
    """The console script: run and end the process."""
    run_door(run)


def _stored(config: ModelConfig) -> str:
    """How the projections are stored, where they are not dense."""
    if config.stored is None:
        return ""
    groups = f"groups of {config.stored.group}" if config.stored.group else "a scale for each row"
    return f", the layers' projections in {config.weights} ({config.stored.method}, {groups})"


def _traits(config: ModelConfig) -> str:
    """Where the model differs from the plainest Llama."""
    rope = config.rope
    traits = [f"rope {rope.type}, theta {rope.theta:g}" + ("" if rope.type == "default" else f", factor {rope.factor:g}")]
    traits[0] += ", frequencies divided as the file lists" if rope.divisors else ""
    for name, has in (
        ("q, k, v bias", config.qkv_bias),
        ("o bias", config.o_bias),
        ("MLP bias", config.mlp_bias),
        ("per-head q and k norm", config.qk_norm),
        (f"window {config.window}", config.window is not None),
        ("LM head tied to the embedding", config.tied),
    ):
        if has:
            traits.append(name)
    return "; ".join(traits)


if __name__ == "__main__":
    main()
