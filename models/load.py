"""Owns the way from a model's name to an engine that runs it. Does not own finding (source) or reading (weights)."""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from models.decoder import Decoder
from models.layout import allocate, pieces
from models.random_weights import fill_randomly
from models.source import ModelSource, find_model
from models.tokenizer import Tokenizer
from models.weights import WeightFiles
from runtime.config import EngineConfig
from runtime.device import free_bytes, resolve
from runtime.engine import Engine
from runtime.errors import ConfigError
from runtime.kv_cache import fit_max_len


@dataclass(frozen=True)
class Loaded:
    """A model ready to run: its config is settled, its notes are what the doors print, load_seconds is that of the weights."""

    engine: Engine
    source: ModelSource
    tokenizer: Tokenizer | None
    config: EngineConfig
    notes: list[str]
    load_seconds: float
    weight_bytes: int


def load_model(source: ModelSource, device: torch.device, dtype: torch.dtype, max_len: int, progress: bool = True) -> Decoder:
    """The decoder on its device with weights read or made there, and rotary tables for `max_len` positions.

    Raises:
        CheckpointError: a weight file that is missing, damaged or does not fit the config.
        OutOfMemoryError: the device cannot hold the weights.
    """
    files = None if source.path is None else WeightFiles(source.path)
    if files is not None:
        files.settle(source.config)
    table = pieces(source.config)
    targets = allocate(table, device, dtype)
    if files is None:
        fill_randomly(targets, table)
    else:
        total = sum(target.nbytes for target in targets.values())
        with _bar(f"loading {source.label}", total, progress) as advance:
            files.copy_into(targets, table, advance)
    return Decoder(source.config, targets, max_len)


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, see `Tokenizer`; None for random weights."""
    return None if source.path is None else Tokenizer(source.path)


def load_engine(
    name: str,
    config: EngineConfig,
    revision: str | None = None,
    random_weights: bool = False,
    needed_len: int | None = None,
    progress: bool = True,
    prepare: bool = True,
) -> Loaded:
    """Find a model, settle the config on this machine, load it and build its engine.

    Args:
        name: MODEL, see `find_model`.
        random_weights: the model's shapes with random weights.
        prepare: compile kernels and capture graphs now; else the caller plays `Engine.prepare` before the first request.
        needed_len: positions the command needs; the capacity where config.max_len is None, the least it may be otherwise.

    Raises:
        QuartetError: as `find_model`, `resolve`, `fit_max_len`, `load_tokenizer` and `load_model`, in this order.
    """
    source = find_model(name, revision, weights=not random_weights)
    if random_weights:
        source = source.with_random_weights()
    if config.max_len is not None and needed_len is not None and needed_len > config.max_len:
        raise ConfigError(f"{needed_len} positions are needed and max_len is {config.max_len}; raise --max-len")
    settled, choices = resolve(config, source.config.dtype)
    device, dtype = torch.device(settled.device), getattr(torch, settled.dtype)
    max_len = fit_max_len(
        config.max_len if config.max_len is not None else needed_len,
        source.config.max_position,
        settled.max_slots,
        source.config.kv_bytes_per_position(settled.dtype),
        source.config.weight_bytes(settled.dtype),
        free_bytes(device),
    )
    settled = replace(settled, max_len=max_len)
    tokenizer = load_tokenizer(source)
    importlib.import_module("torch.nn.attention.bias")  # takes seconds, which the first prompt should not wait for
    start = time.perf_counter()
    decoder = load_model(source, device, dtype, max_len, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, size = time.perf_counter() - start, decoder.weight_bytes
    limit = source.config.max_position
    why = ": random weights have no limit" if limit is None else f": cut from the model's {limit}" if max_len < limit else ""
    notes = [
        *([] if source.note is None else [source.note]),
        *choices,
        f"context {max_len} positions in each of {settled.max_slots} slots{why}",
        f"weights {size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e9 / seconds:.1f} GB/s",
    ]
    engine = Engine(decoder, settled)
    if prepare and device.type == "cuda":
        notes.append(str(engine.prepare()))
    return Loaded(engine, source, tokenizer, settled, notes, seconds, size)


@contextmanager
def _bar(title: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where that is a terminal; yields what to call with the bytes done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)
