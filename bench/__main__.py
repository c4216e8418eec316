"""The door `python -m bench`: a subcommand for each measurement. Owns their flags; the modules beside it own the rest.

Every command's last line on stdout is one JSON object with the environment in it; with `-o json` it is all there is.
"""

import os

# Read when torch loads OpenMP: threads that wait at the end of an operation sleep. Spinning, as they do by default, costs a
# decode step on a busy CPU ten times its length.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar, cast

from bench import check, latency
from runtime.__main__ import add_engine_flags, engine_config, run_door
from runtime.config import MAX_SLOTS
from runtime.errors import ConfigError

T = TypeVar("T")
Options = TypeVar("Options", latency.LatencyOptions, check.CheckOptions)


def parser() -> argparse.ArgumentParser:
    """The flags of this door."""
    flags = argparse.ArgumentParser(prog="python -m bench", description="Measure Quartet. The last line is one JSON object.")
    commands = flags.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_latency(commands.add_parser("latency", conflict_handler="resolve", help="first-token and inter-token times"))
    _add_check(commands.add_parser("check", conflict_handler="resolve", help="logits against transformers"))
    return flags


def _add_latency(flags: argparse.ArgumentParser) -> None:
    flags.description = "Time prefill and decode of every combination of --ops, --graph, --batch and --depth, taking turns."
    _add_engine_flags(flags)
    group = flags.add_argument_group("matrix")
    group.add_argument("--batch", type=_list(_count(1, MAX_SLOTS)), default=(1,), metavar="N,N", help="streams (default: 1)")
    group.add_argument("--depth", type=_list(_count(0)), default=(0,), metavar="N,N", help="random K and V before the prompt")
    group.add_argument("--prompt-len", type=_count(1), default=512, metavar="N", help="default: 512")
    group.add_argument("--gen-len", type=_count(3), default=128, metavar="N", help="at least 3 (default: 128)")
    group.add_argument("--reps", type=_count(1), default=5, metavar="N", help="counted passes of each cell (default: 5)")
    group.add_argument("--warmup", type=_count(0), default=1, metavar="N", help="uncounted full passes (default: 1)")
    group.add_argument("--random-weights", action="store_true", help="random weights of the model's shapes")
    group.add_argument("--against", choices=("transformers",), help="Hugging Face plays the same cells")
    output = flags.add_argument_group("output")
    output.add_argument("-o", dest="format", choices=("md", "json", "jsonl", "csv"), default="md", help="default: md")
    output.add_argument("--output", type=Path, metavar="FILE", help="write the report there too")
    output.add_argument("--profile", type=Path, metavar="FILE", help="keep the profiler's trace (.json, .json.gz)")
    flags.set_defaults(run=lambda args: latency.run(_options(latency.LatencyOptions, args, max(args.batch))))


def _add_check(flags: argparse.ArgumentParser) -> None:
    flags.description = "Play token ids through prefill and decode, each fed from the list, and write or judge the logits."
    _add_engine_flags(flags)
    group = flags.add_argument_group("check")
    group.add_argument("--ids", type=Path, metavar="FILE", help="JSON list of token ids (default: 64 drawn with seed 0)")
    group.add_argument("--prefill", type=_count(0), metavar="N", help="ids that go through prefill (default: half)")
    group.add_argument("--rows", type=_count(1, MAX_SLOTS), default=1, metavar="B", help="the ids play in rows 0 and B-1")
    group.add_argument("--logits", type=Path, metavar="FILE", help="write [ids, vocabulary] float32 logits as safetensors")
    group.add_argument("--against", choices=("transformers",), help="judge by rule N; exit code 1 if it fails")
    group.add_argument("-o", dest="format", choices=("text", "json"), default="text", help="json: nothing but the last line")
    flags.set_defaults(run=lambda args: check.run(_options(check.CheckOptions, args, args.rows)))


def _add_engine_flags(flags: argparse.ArgumentParser) -> None:
    """The doors' engine flags, with lists where a bench plays several; the slots follow from what is played."""
    add_engine_flags(flags, model_positional=False)
    flags.set_defaults(prefix_reuse=False)  # no prompt may be answered from an earlier pass's cache
    for flag, words in (("--ops", ("auto", "fused", "unfused")), ("--graph", ("auto", "on", "off"))):
        flags.add_argument(flag, type=_list(_word(words)), default=("auto",), metavar="NAME,NAME", help=", ".join(words))
    flags.add_argument("--max-slots", type=int, metavar="N", help="default: what the largest batch needs")


def _options(kind: type[Options], args: argparse.Namespace, rows: int) -> Options:
    """A command's options out of its flags, with an EngineConfig for each combination of --ops and --graph."""
    if args.max_slots is not None and args.max_slots < rows:
        raise ConfigError(f"--max-slots is {args.max_slots} and {rows} rows are to be played; raise it or leave it out")
    flags = {name: value for name, value in vars(args).items() if name != "run"}
    played = {**flags, "max_slots": args.max_slots or rows}
    combinations = [{**played, "ops": ops, "graph": graph} for ops in args.ops for graph in args.graph]
    wishes = tuple(engine_config(argparse.Namespace(**each)) for each in combinations)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    values = {**flags, "wishes": wishes, "flags": plain}
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def _count(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: one integer in a range."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} is not allowed: {least} " + ("and up" if most is None else f"to {most}"))
        return value

    return read


def _word(allowed: Sequence[str]) -> Callable[[str], str]:
    """An argparse type: one of the allowed words."""

    def read(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return read


def _list(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argparse type: values separated by commas, each once."""
    return lambda text: tuple(dict.fromkeys(read(part) for part in text.split(",")))


def run(argv: Sequence[str] | None = None) -> int:
    """Parse and run one subcommand; its exit code."""
    args = parser().parse_args(argv)
    return cast(int, args.run(args))


def main() -> None:
    """The console script: run and end the process."""
    run_door(run)


if __name__ == "__main__":
    main()
