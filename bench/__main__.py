"""The door `python -m bench`: a subcommand for each measurement. Owns their flags; the modules beside it own the rest.

Every command's last line on stdout is one JSON object with the environment in it; with `-o json` it is all there is.
"""

import os

# Read when torch loads OpenMP: threads that wait at the end of an operation sleep. Spinning, as they do by default, costs a
# decode step on a busy CPU ten times its length.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import signal
import sys

# `python -m` puts the current folder first: one that holds a `models` of its own must not take the place of ours.
if __name__ == "__main__" and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]
# The imports take seconds; Ctrl-C meanwhile should end the process, not show where in torch it was.
_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from bench import check, compare, fusion, http, kernels, latency, launches, roofline
from bench.experiments import EXPERIMENTS
from bench.output import Output
from bench.steps import StepsOptions, device_failed
from runtime.__main__ import add_engine_flags, engine_config, parse, run_door, typed_name
from runtime.config import DTYPES, MAX_SLOTS, WEIGHTS, EngineConfig
from runtime.device import resolve
from runtime.errors import ConfigError, OutOfMemoryError

signal.signal(signal.SIGINT, _interrupt)

T = TypeVar("T")
Options = TypeVar("Options", latency.LatencyOptions, check.CheckOptions, StepsOptions, http.HttpOptions)
DEVICES = ("auto", "cpu", "cuda")


def parser() -> argparse.ArgumentParser:
    """The flags of this door."""
    flags = argparse.ArgumentParser(prog=typed_name("bench"), description="Measure Quartet. The last line is one JSON object.")
    commands = flags.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add, about in (
        ("latency", _add_latency, "first-token and inter-token times of every combination of flags, taking turns"),
        ("roofline", _add_roofline, "a step's bytes by launch, the time they predict, and the measured one"),
        ("kernels", _add_kernels, "each kernel's bytes, floor, time and registers, beside what it replaces; the tuner"),
        ("fusion", _add_fusion, "the shapes of fusion and its limits, as experiments"),
        ("launches", _add_launches, "what a launch costs: torch op, Triton launch, graph node, node with PDL"),
        ("http", _add_http, "a server's first-token and inter-token times as a client sees them"),
        ("compare", _add_compare, "two results of one command; exit code 1 if B is slower past a threshold"),
        ("check", _add_check, "play token ids, each fed from the list, and write or judge the logits"),
    ):
        add(commands.add_parser(name, conflict_handler="resolve", help=about, description=about))
    return flags


def _add_latency(flags: argparse.ArgumentParser) -> None:
    _add_engine_flags(flags)
    about = f"{', '.join(WEIGHTS)}: formats of a layer's projections, side by side (default: auto, as stored)"
    flags.add_argument("--weights", type=_list(_word(WEIGHTS)), default=("auto",), metavar="NAME,NAME", help=about)
    add = flags.add_argument_group("matrix").add_argument
    add("--batch", type=_list(_count(1, MAX_SLOTS)), default=(1,), metavar="N,N", help="streams (default: 1)")
    add("--depth", type=_list(_count(0)), default=(0,), metavar="N,N", help="random K and V before the prompt")
    add("--alone", type=_list(_count(0)), default=(), metavar="N,N", help="further depths, of one stream alone")
    add("--prompt-len", type=_count(1), default=512, metavar="N", help="default: 512")
    add("--gen-len", type=_count(3), default=128, metavar="N", help="at least 3 (default: 128)")
    add("--reps", type=_count(1), default=5, metavar="N", help="counted passes of each cell (default: 5)")
    add("--warmup", type=_count(0), default=1, metavar="N", help="uncounted full passes (default: 1)")
    add("--random-weights", action="store_true", help="random weights of the model's shapes")
    add("--against", choices=("transformers",), help="Hugging Face plays the same cells")
    add("--ladder", action="store_true", help="play every rung from unfused eager to fused with PDL")
    add("--start", action="store_true", help="measure start costs too, cold and warm")
    add("--no-counts", dest="counts", action="store_false", help="no profiler: no launches, no busy times")
    output = _add_output_flags(flags)
    output.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of where a token's time goes")
    about = "keep the profiler's trace, PDL off (.json, .json.gz), for Perfetto"
    output.add_argument("--profile", type=Path, metavar="FILE", help=about)
    flags.set_defaults(run=lambda args: latency.run(_matrix(latency.LatencyOptions, args, max(args.batch))))


def _add_steps_flags(flags: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """MODEL and the shape of whole steps."""
    flags.add_argument("--model", metavar="MODEL", default="demo", help="as everywhere (default: demo)")
    flags.add_argument("--revision", help="branch, tag or commit of a hub id")
    flags.add_argument("--random-weights", action="store_true", help="random weights of the model's shapes")
    flags.add_argument("--device", choices=DEVICES, default="auto")
    flags.add_argument("--dtype", choices=DTYPES, default="auto")
    flags.add_argument("--weights", choices=WEIGHTS, default="auto", help="of a layer's projections (default: as stored)")
    group = flags.add_argument_group("steps")
    group.add_argument("--batch", type=_list(_count(1, MAX_SLOTS)), default=(1, 8), metavar="N,N", help="rows (default: 1,8)")
    group.add_argument("--context", type=_count(1), default=512, metavar="N", help="positions a row reads (default: 512)")
    _add_output_flags(flags)
    return group


def _add_roofline(flags: argparse.ArgumentParser) -> None:
    about = "h200: figures on record, arithmetic only; measured: this device's (default: measured on a GPU, else h200)"
    _add_steps_flags(flags).add_argument("--gpu", choices=("h200", "measured"), help=about)
    flags.set_defaults(run=lambda args: roofline.run(_steps(args), args.gpu))


def _add_kernels(flags: argparse.ArgumentParser) -> None:
    group = _add_steps_flags(flags)
    group.add_argument("--tune", action="store_true", help="search tiles by whole-step time; the runtime reads what is found")
    group.add_argument("--tune-seconds", type=_count(1), default=120, metavar="N", help="for each batch (default: 120)")
    flags.set_defaults(run=lambda args: kernels.run(_steps(args), args.tune_seconds if args.tune else None))


def _add_fusion(flags: argparse.ArgumentParser) -> None:
    _add_launches(flags)
    about = f"of {', '.join(EXPERIMENTS)}"
    flags.add_argument("--only", type=_list(_word(EXPERIMENTS)), metavar="NAME,NAME", help=about)
    flags.set_defaults(run=lambda args: fusion.run(_device(args), args.only, _output(args), _flags(args)))


def _add_launches(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--device", choices=DEVICES, default="auto")
    _add_output_flags(flags)
    flags.set_defaults(run=lambda args: launches.run(_device(args), _output(args), _flags(args)))


def _add_http(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    flags.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    flags.add_argument("--api-key", metavar="K")
    flags.add_argument("--requests", type=_count(1), default=50, metavar="N", help="counted ones (default: 50)")
    flags.add_argument("--warmup", type=_count(0), default=1, metavar="N", help="uncounted ones before them (default: 1)")
    flags.add_argument("--concurrency", type=_count(1), default=1, metavar="N", help="streams at once (default: 1)")
    flags.add_argument("--prompt-len", type=_count(1), default=128, metavar="N", help="default: 128")
    flags.add_argument("--gen-len", type=_count(2), default=128, metavar="N", help="default: 128")
    _add_output_flags(flags)
    flags.set_defaults(run=lambda args: http.run(_options(http.HttpOptions, args)))


def _add_compare(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("a", type=Path, metavar="A.json")
    flags.add_argument("b", type=Path, metavar="B.json")
    flags.add_argument("--threshold", type=_count(0), default=5, metavar="PERCENT", help="B may be slower by this (default: 5)")
    _add_output_flags(flags)
    flags.set_defaults(run=lambda args: compare.run(args.a, args.b, args.threshold / 100, _output(args)))


def _add_check(flags: argparse.ArgumentParser) -> None:
    _add_engine_flags(flags)
    group = flags.add_argument_group("check")
    given = group.add_mutually_exclusive_group()
    given.add_argument("--ids", type=Path, metavar="FILE", help="JSON list of token ids (default: those of a short text)")
    given.add_argument("--prompt-ids", type=_each(_count(0)), metavar="IDS", help="token ids, separated by commas")
    group.add_argument("--prefill", type=_count(0), metavar="N", help="ids that go through prefill (default: half)")
    group.add_argument("--rows", type=_count(1, MAX_SLOTS), default=1, metavar="B", help="the ids play in rows 0 and B-1")
    group.add_argument("--logits", type=Path, metavar="FILE", help="write [ids, vocabulary] float32 logits as safetensors")
    group.add_argument("--against", choices=("transformers",), help="judge by rule N; exit code 1 if it fails")
    group.add_argument("-o", dest="format", choices=("text", "json"), default="text", help="json: nothing but the last line")
    flags.set_defaults(run=lambda args: check.run(_matrix(check.CheckOptions, args, args.rows)))


def _add_engine_flags(flags: argparse.ArgumentParser) -> None:
    """The doors' engine flags, with lists where a bench plays several; the slots follow from what is played."""
    add_engine_flags(flags, model_positional=False)
    flags.set_defaults(prefix_reuse=False)  # no prompt may be answered from an earlier pass's cache
    for flag, words in (("--ops", ("auto", "fused", "unfused")), ("--graph", ("auto", "on", "off"))):
        flags.add_argument(flag, type=_list(_word(words)), default=("auto",), metavar="NAME,NAME", help=", ".join(words))
    flags.add_argument("--max-slots", type=int, metavar="N", help="default: what the largest batch needs")


def _add_output_flags(flags: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = flags.add_argument_group("output")
    group.add_argument("-o", dest="format", choices=("md", "json", "jsonl", "csv"), default="md", help="default: md")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the report there too")
    group.add_argument("--html", type=Path, metavar="FILE", help="write it as one HTML file, pictures inside")
    return group


def _matrix(kind: type[Options], args: argparse.Namespace, rows: int) -> Options:
    """A command's options out of its flags, with an EngineConfig for each combination of --weights, --ops and --graph."""
    if args.max_slots is not None and args.max_slots < rows:
        raise ConfigError(f"--max-slots is {args.max_slots} and {rows} rows are to be played; raise it or leave it out")
    played = {**_flags(args), "max_slots": args.max_slots or rows}
    formats = (args.weights,) if isinstance(args.weights, str) else args.weights
    each = (dict(zip(("weights", "ops", "graph"), words, strict=True)) for words in product(formats, args.ops, args.graph))
    return _options(kind, args, wishes=tuple(engine_config(argparse.Namespace(**played | words)) for words in each))


def _steps(args: argparse.Namespace) -> StepsOptions:
    """The options of a command that plays whole steps outside the engine."""
    return _options(StepsOptions, args, config={name: getattr(args, name) for name in ("device", "dtype", "weights")})


def _options(kind: type[Options], args: argparse.Namespace, **more: object) -> Options:
    flags = _flags(args)
    values = {**flags, "output": _output(args) if "output" in flags else None, "flags": flags, **more}
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "run"}


def _output(args: argparse.Namespace) -> Output:
    return Output(args.format, args.output, args.html)


def _device(args: argparse.Namespace) -> torch.device:
    return torch.device(resolve(EngineConfig(device=args.device), "bfloat16")[0].device)


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


def _each(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argparse type: values separated by commas."""
    return lambda text: tuple(map(read, text.split(",")))


def _list(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """The same, each once."""
    return lambda text: tuple(dict.fromkeys(map(read, text.split(","))))


def run(argv: Sequence[str] | None = None) -> int:
    """Parse and run one subcommand; its exit code. Raises QuartetError, DeviceError for any error of the device's."""
    args = parse(parser(), argv)
    try:
        return cast(int, args.run(args))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the device's memory is full: {str(error).splitlines()[0]}") from error
    except torch.AcceleratorError as error:
        raise device_failed(error) from error


def main() -> None:
    """The console script: run and end the process."""
    run_door(run)


if __name__ == "__main__":
    main()
