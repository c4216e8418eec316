"""The door `python -m runtime`: one prompt, or a chat, in the terminal.

Owns too the flags that all doors share and how a door ends.
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
import errno
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from models import Loaded, find_model, load_engine, load_tokenizer
from models.random_weights import PREFIX
from models.tokenizer import Tokenizer
from runtime.config import DTYPES, MAX_SLOTS, WEIGHTS, EngineConfig
from runtime.errors import ContextLengthError, QuartetError, RequestError
from runtime.request import Request, SamplingParams, require_ids

signal.signal(signal.SIGINT, _interrupt)

Message = dict[str, str]


def add_engine_flags(parser: argparse.ArgumentParser, model_positional: bool, slots: int = 8) -> None:
    """Add MODEL (an argument, or --model) and the flags of the engine, with `slots` as the default of --max-slots."""
    about = "`demo`, a folder, a .gguf file, a Hugging Face hub id, or random:<shape> (default: demo)"
    if model_positional:
        parser.add_argument("model", metavar="MODEL", nargs="?", default="demo", help=about)
    else:
        parser.add_argument("--model", metavar="MODEL", default="demo", help=about)
    group = parser.add_argument_group("engine")
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto keeps the type that is stored")
    group.add_argument("--weights", choices=WEIGHTS, default="auto", help="quantize a layer's projections; auto: as stored")
    group.add_argument("--ops", choices=("auto", "fused", "unfused"), default="auto", help="which kernels play a layer")
    group.add_argument("--graph", choices=("auto", "on", "off"), default="auto", help="replay decode steps as CUDA graphs")
    group.add_argument("--pdl", choices=("auto", "on", "off"), default="auto", help="programmatic dependent launch")
    group.add_argument(
        "--max-len", type=_positions, metavar="N", help="positions a slot holds; auto (default): the model's, cut to what fits"
    )
    group.add_argument(
        "--max-slots", type=int, default=slots, metavar="N", help=f"requests at once, 1 to {MAX_SLOTS} (default: {slots})"
    )
    group.add_argument(
        "--prefill-chunk", type=int, default=512, metavar="N", help="prompt tokens between two decode steps (default: 512)"
    )
    group.add_argument(
        "--no-prefix-reuse", dest="prefix_reuse", action="store_false", help="compute every prompt from its first token"
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that the flags of `add_engine_flags` ask for.

    Raises:
        ConfigError: a value outside its range.
    """
    names = ("device", "dtype", "weights", "ops", "graph", "pdl", "max_len", "max_slots", "prefill_chunk", "prefix_reuse")
    return EngineConfig(**{name: getattr(args, name) for name in names})


def typed_name(door: str) -> str:
    """What a door's usage line calls it: its console script if that was typed."""
    script = Path(sys.argv[0]).stem
    return script if script.startswith("quartet-") else f"python -m {door}"


def parse(flags: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags of a door that takes MODEL as --model; a word that stands alone is taken for one, and told so."""
    args, unknown = flags.parse_known_args(argv)
    if unknown:
        alone = hasattr(args, "model") and not unknown[0].startswith("-")
        hint = f"; a model is given as --model {unknown[0]}" if alone else ""
        flags.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def run_door(run: Callable[[], int | None]) -> None:
    """Run a door and end the process: 0 or what `run` returns, 1 with one sentence for a QuartetError, 130 after Ctrl-C."""
    # Without a workspace cuBLAS does not split K of a product of few rows over two launches: one launch an operation, and no
    # slower. torch reads this at its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # its descriptor was closed; `print` would take stdout in place of stderr
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - as long as the process
    try:
        code = run() or 0
        sys.stdout.flush()
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader has gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        print(f"error: what was to be printed cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def parser() -> argparse.ArgumentParser:
    """The flags of this door."""
    about = "Run a model in the terminal. Without a prompt: a chat on a terminal, otherwise the prompt is read from stdin."
    flags = argparse.ArgumentParser(prog=typed_name("runtime"), description=about)
    add_engine_flags(flags, model_positional=True, slots=1)
    prompt = flags.add_argument_group("prompt")
    either = prompt.add_mutually_exclusive_group()
    either.add_argument("--prompt", metavar="TEXT")
    either.add_argument("--prompt-ids", metavar="IDS", type=_ids, help="token ids, separated by commas, in place of a text")
    prompt.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    prompt.add_argument("--chat-template", metavar="NAME|FILE", help="one of the model's templates, or a file that holds one")
    prompt.add_argument("--system", metavar="TEXT", help="a system message in front of the chat")
    sampling = flags.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="default: to the end of the context")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--ignore-eos", action="store_true", help="run on past the end tokens")
    return flags


class Terminal:
    """One loaded model that answers on stdout."""

    def __init__(self, loaded: Loaded, args: argparse.Namespace, params: SamplingParams) -> None:
        self._loaded, self._params, self._max_tokens = loaded, params, args.max_tokens
        self._end_ids = () if args.ignore_eos else loaded.source.end_ids
        self._count = 0

    def chat(self, tokenizer: Tokenizer, opening: list[Message]) -> None:
        """Talk until Ctrl-D; Ctrl-C stops an answer."""
        with suppress(ImportError):  # not built everywhere
            importlib.import_module("readline")  # gives `input` its line editing
        print("Ctrl-D ends the chat, Ctrl-C an answer.", file=sys.stderr)
        said = opening
        while (line := _ask()) is not None:
            said = self._turn(tokenizer, opening, said, line)

    def _turn(self, tokenizer: Tokenizer, opening: list[Message], said: list[Message], line: str) -> list[Message]:
        """Answer a line behind what was said, or alone where it fits only so; what has been said now."""
        asked, alone = [*said, _said("user", line)], [*opening, _said("user", line)]
        room = self._loaded.engine.max_len
        try:
            if len(tokenizer.encode_chat(asked)) >= room > len(tokenizer.encode_chat(alone)):
                print("The conversation has filled the context: a new one begins with this message.", file=sys.stderr)
                asked = alone
            with _stoppable() as stopped:
                return [*asked, _said("assistant", self.ids(tokenizer.encode_chat(asked), stopped))]
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            return said

    def ids(self, prompt_ids: Sequence[int], stopped: Callable[[], bool] = lambda: False) -> str:
        """Answer token ids: stream the text (ids, without a tokenizer) to stdout, and a line of figures to stderr.

        Raises:
            RequestError: the request cannot run, or its logits were not finite.
        """
        self._count += 1
        request = Request(str(self._count), tuple(prompt_ids), self._params, self._max_tokens, end_ids=self._end_ids)
        stream = self._loaded.tokenizer.stream(prompt_ids) if self._loaded.tokenizer else None
        text, times = "", []
        start = time.perf_counter()
        for token in self._tokens(request, stopped):
            times.append(time.perf_counter())
            if token not in request.end_ids:
                text += _show(stream.push([token]) if stream else f"{token} ")
        text += _show(stream.flush() if stream else "")
        print(flush=True)
        figures = f"[{len(prompt_ids)} prompt tokens, {len(times)} output tokens"
        if times:
            figures += f", first token {(times[0] - start) * 1e3:.1f} ms"
        if len(times) > 1:
            figures += f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tok/s"
        print(f"{figures}]", file=sys.stderr)
        return text

    def _tokens(self, request: Request, stopped: Callable[[], bool]) -> Iterator[int]:
        engine = self._loaded.engine
        engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if event.finish == "error":
                    raise RequestError(event.message or "the request failed")
                if event.token is not None:
                    yield event.token
            if stopped():
                engine.cancel(request.id)


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, load, answer. What can be refused is refused before the weights are read."""
    args = parser().parse_args(argv)
    config, params = engine_config(args), SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    text = _text(args)
    source = find_model(args.model, args.revision)
    ids_only = args.prompt_ids is not None and not source.has_tokenizer
    tokenizer = None if ids_only else load_tokenizer(source, args.chat_template)
    templated = tokenizer is not None and tokenizer.has_chat_template and not args.raw
    opening = [] if args.system is None else [_said("system", args.system)]
    if opening and not templated:
        raise RequestError(f"{source.name} has no chat template, so --system has no place; leave it out")
    ids = args.prompt_ids
    if text is not None:
        assert tokenizer is not None
        ids = tokenizer.encode_chat([*opening, _said("user", text)]) if templated else tokenizer.encode(text)
    elif ids is None and not templated:
        raise RequestError(f"{source.name} has no chat template to talk by; give --prompt or --prompt-ids")
    if ids is not None:
        Request("", tuple(ids), params, args.max_tokens)  # raises what is wrong with it
        require_ids(ids, source.config.vocab_size)
        _fit(len(ids), config.max_len, source.config.max_position)

    needed = None
    if args.prompt_ids is not None and args.max_tokens is not None:
        bounds = [bound for bound in (config.max_len, source.config.max_position) if bound is not None]
        needed = min([len(ids) + args.max_tokens, *bounds])  # a longer answer is cut there
    loaded = load_engine(source, config, needed_len=needed, tokenizer=tokenizer)
    print(*loaded.notes, sep="\n", file=sys.stderr)
    terminal = Terminal(loaded, args, params)
    if ids is not None:
        terminal.ids(ids)
    else:
        assert tokenizer is not None
        terminal.chat(tokenizer, opening)
    return 0


def main() -> None:
    """The console script: run and end the process."""
    run_door(run)


def _text(args: argparse.Namespace) -> str | None:
    """The text to answer, from --prompt or stdin; None for token ids and for a chat.

    Raises:
        RequestError: nothing to answer, or flags that contradict each other.
    """
    ids = args.prompt_ids is not None
    for flag, given, other, asked, why in (
        ("--raw", args.raw, "--prompt-ids", ids, "token ids are always taken as they are"),
        ("--system", args.system is not None, "--prompt-ids", ids, "a system message belongs to a text"),
        ("--system", args.system is not None, "--raw", args.raw, "without the chat template there is no system message"),
        ("--chat-template", args.chat_template is not None, "--prompt-ids", ids, "token ids go through no template"),
        ("--chat-template", args.chat_template is not None, "--raw", args.raw, "a raw text goes through no template"),
    ):
        if given and asked:
            raise RequestError(f"{flag} and {other} were given: {why}; leave one of them out")
    if ids:
        return None
    if args.model.startswith(PREFIX):
        find_model(args.model)  # an unknown name is told first
        raise RequestError(f"{args.model} has no tokenizer; give --prompt-ids 1,2,3 in place of a text")
    text: str | None = args.prompt
    try:
        if text is None and not sys.stdin.isatty():
            text = sys.stdin.read().removesuffix("\n")
        (text or "").encode()  # bytes that are none of the terminal's encoding come as surrogates, or not at all
    except UnicodeError:
        raise RequestError("the prompt is not UTF-8; convert it, with `iconv -f latin1 -t utf-8` for example") from None
    if text == "":
        raise RequestError("the prompt is empty; give --prompt TEXT, or a text on stdin")
    return text


def _fit(length: int, max_len: int | None, model_limit: int | None) -> None:
    """Raises ContextLengthError for a prompt that leaves no room for an answer."""
    limit = min((each for each in (max_len, model_limit) if each is not None), default=length + 1)
    if length >= limit:
        raisable = limit == max_len and limit != model_limit
        raise ContextLengthError(
            f"the prompt has {length} tokens and the context holds {limit}, the answer included; "
            + (f"raise --max-len above {length}" if raisable else "shorten the prompt")
        )


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids like 1,2,3") from error


def _positions(text: str) -> int | None:
    if text == "auto" or text.lstrip("-").isdigit():
        return None if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number")


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _ask() -> str | None:
    """The next line that is not empty; None at the end of input. Ctrl-C here only drops the line."""
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\nCtrl-D ends the chat.", file=sys.stderr)
            continue
        if line:
            return line


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a question that is asked between steps: an interrupt inside one would leave the engine half-way."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    before: Any = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _show(text: str) -> str:
    """Write to stdout at once; the text again."""
    if text:
        print(text, end="", flush=True)
    return text


if __name__ == "__main__":
    main()
