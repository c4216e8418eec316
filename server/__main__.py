"""The door `python -m server`: loads a model and serves it over HTTP. Owns the flags and the order of starting."""

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
import asyncio
import gc
import logging
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import uvloop

from models import Loaded, find_model, load_engine, load_tokenizer
from runtime.__main__ import add_engine_flags, engine_config, parse, run_door, typed_name
from runtime.errors import ConfigError, RequestError
from runtime.request import SamplingParams
from server.app import Service, Settings, create_app, facts
from server.logs import set_up
from server.schema import SamplingDefaults
from server.serve import bind, listen, serve

signal.signal(signal.SIGINT, _interrupt)

log = logging.getLogger("server")

KEY_VARIABLE = "QUARTET_API_KEY"


def parser() -> argparse.ArgumentParser:
    """The flags of this door."""
    flags = argparse.ArgumentParser(prog=typed_name("server"), description="Serve a model over HTTP, with OpenAI's API.")
    add_engine_flags(flags, model_positional=False)
    http = flags.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    http.add_argument("--port", type=int, default=8000, help="0 takes any free port (default: 8000)")
    http.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names the model answers to, the first is official"
    )
    http.add_argument(
        "--api-key", metavar="K", help=f"bearer token of every path but /health and the page (default: ${KEY_VARIABLE})"
    )
    http.add_argument(
        "--max-queue", type=int, default=128, metavar="N", help="requests that may wait for a slot (default: 128)"
    )
    http.add_argument("--chat-template", metavar="NAME|FILE", help="one of the model's templates, or a file that holds one")
    http.add_argument("--max-body-bytes", type=int, metavar="N", help="default: 8 MiB, or 64 bytes a position if that is more")
    http.add_argument("--shutdown-timeout", type=float, default=30, metavar="S", help="seconds to finish answers (default: 30)")
    http.add_argument("--cors-origins", nargs="+", default=[], metavar="ORIGIN", help="pages that may call; * is any")
    http.add_argument(
        "--warm", choices=("mode", "all"), default="mode", help="graphs captured at start: the mode's (default) or every mode's"
    )
    http.add_argument("--no-page", action="store_true", help="do not serve the page at /")
    http.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    http.add_argument("--log-format", choices=("text", "json"), default="text")
    draw = flags.add_argument_group("sampling of requests that say nothing else")
    draw.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="none: not as the model's generation_config.json asks",
    )
    for name, default in asdict(SamplingDefaults()).items():
        flag, kind = f"--{name.replace('_', '-')}", type(default)
        draw.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=f"default: {default:g}")
    return flags


def settings(args: argparse.Namespace, label: str, sampling: Mapping[str, Any] | None = None) -> Settings:
    """What the flags say of the server; `sampling` is what the model asks for where they say nothing.

    Raises:
        ConfigError: a value outside its range.
    """
    for name, least in (("max_queue", 0), ("shutdown_timeout", 0), ("max_body_bytes", 1)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {least} or above")
    for name in ("served_model_name", "cors_origins"):
        if "" in (getattr(args, name) or ()):
            raise ConfigError(f"--{name.replace('_', '-')} holds an empty word; leave it out or give one")
    api_key, whence = args.api_key, "--api-key"
    if api_key is None:
        api_key, whence = os.environ.get(KEY_VARIABLE), f"${KEY_VARIABLE}"
    if api_key == "":
        raise ConfigError(f"{whence} is empty, which would lock nothing; leave it out or give a key")
    if api_key is not None and not all("!" <= each <= "~" for each in api_key):
        raise ConfigError(
            f"{whence} holds a space or another character that no bearer token can; give one of letters and digits"
        )
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must lie between 0 and 65535")
    given = sampling_flags(args)
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"--{(error.param or '').replace('_', '-')}: {error}") from None
    return Settings(
        defaults=SamplingDefaults(**{**(sampling or {}), **given}),
        names=tuple(args.served_model_name or [label]),
        max_queue=args.max_queue,
        max_body_bytes=args.max_body_bytes,
        api_key=api_key,
        cors_origins=tuple(args.cors_origins),
        every_mode=args.warm == "all",
        page=not args.no_page,
    )


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling defaults that were given as flags."""
    return {name: getattr(args, name) for name in asdict(SamplingDefaults()) if getattr(args, name) is not None}


def announce(loaded: Loaded, wanted: Settings, whose: str, sock: socket.socket) -> None:
    """Say what is served, how, and where; `whose` the sampling defaults are."""
    defaults = wanted.defaults
    for note in loaded.notes:
        print(note)
    print(f"KV cache {loaded.engine.cache.nbytes / 1e9:.2f} GB")
    print(floor(facts(loaded)))
    print(
        f"sampling defaults: temperature {defaults.temperature:g}, top_p {defaults.top_p:g}, top_k {defaults.top_k}, "
        f"min_p {defaults.min_p:g}, repetition_penalty {defaults.repetition_penalty:g} ({whose})"
    )
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::") and wanted.api_key is None:
        log.warning("anyone who can reach this machine can use this server; set --api-key or $%s", KEY_VARIABLE)
    if wanted.page:
        print("GET / is a page to chat and to watch what a token costs; --no-page turns it off")
    print(f"Serving {wanted.names[0]} on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)


def floor(known: Mapping[str, Any]) -> str:
    """The least time that the memory bus allows a token, from what `facts` knows."""
    if known["floor_ms"] is None:
        return f"bandwidth floor: not known, no datasheet's read rate for {known['device_name']}"
    read = f"{known['weight_bytes_per_token'] / 1e9:.2f} GB of weights at the datasheet's {known['datasheet_gbps']:,.0f} GB/s"
    return f"bandwidth floor: {known['floor_ms']:.2f} ms a token, {read}"


def run(args: argparse.Namespace) -> None:
    """Take the port, read the weights, open the port, serve until a signal."""
    set_up(args.log_level, args.log_format)
    config, _ = engine_config(args), settings(args, "")  # a wrong flag is told before the model is looked for
    with bind(args.host, args.port) as sock:
        source = find_model(args.model, args.revision)
        tokenizer = load_tokenizer(source, args.chat_template)
        loaded = load_engine(source, config, prepare=False, tokenizer=tokenizer)
        asked = source.sampling if args.generation_config == "auto" else {}
        wanted = settings(args, source.label, asked)
        flagged = sampling_flags(args)
        told = {"flag": list(flagged), "generation_config.json": [name for name in asked if name not in flagged]}
        whose = "".join(f"{' and '.join(names)} by {source}, " for source, names in told.items() if names)
        service = Service(loaded, wanted)
        app = create_app(service, wanted)
        gc.collect()  # the worker freezes what is left: a pause here is one that no token meets
        listen(sock)
        announce(loaded, wanted, f"{whose}{'the rest ' if whose else ''}the API's", sock)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(app, service.dispatcher, sock, args.shutdown_timeout))
            if not service.stopped:  # a call does not return, or not soon: neither loop nor interpreter could end around it
                logging.shutdown()
                os._exit(0)


def main() -> None:
    """The console script: run and end the process."""
    args = parse(parser())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the server listens to signals itself
    run_door(lambda: run(args))


if __name__ == "__main__":
    main()
