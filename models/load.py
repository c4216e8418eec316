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
    """A model ready to run.

    Attributes:
        engine: takes requests.
        source: what was found.
        tokenizer: None for random weights.
        config: settled: no "auto" left, max_len set.
        notes: one sentence for each choice made, for the doors to print.
        load_seconds: from the first byte read to the last weight in place.
        weight_bytes: weights on the device.
    """

    engine: Engine
    source: ModelSource
    tokenizer: Tokenizer | None
    config: EngineConfig
    notes: list[str]
    load_seconds: float
    weight_bytes: int


def load_model(source: ModelSource, device: torch.device, dtype: torch.dtype, max_len: int, progress: bool = True) -> Decoder:
    """The decoder on its device, its weights read or made there.

    Args:
        max_len: positions its rotary tables hold.
        progress: show a bar on stderr, where that is a terminal.

    Raises:
        CheckpointError: a weight file that is missing, damaged or does not fit the config.
        OutOfMemoryError: the device cannot hold the weights.
    """
    table = pieces(source.config)
    if source.path is None:
        targets = allocate(table, device, dtype)
        fill_randomly(targets, table)
        return Decoder(source.config, targets, max_len)
    files = WeightFiles(source.path)
    files.settle(source.config)
    files.check(table, source.config.tied)
    targets = allocate(table, device, dtype)
    total = sum(target.nbytes for target in targets.values())
    with _bar(f"loading {source.label}", total, progress) as advance:
        files.copy_into(targets, table, advance)
    return Decoder(source.config, targets, max_len)


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer; None for random weights.

    Raises:
        CheckpointError: the folder has none, or it cannot be loaded.
    """
    return None if source.path is None else Tokenizer(source.path, source.end_ids)


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
    settled, notes = resolve(config, source.config.dtype)
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
    notes.append(f"context {max_len} positions in each of {settled.max_slots} slots" + _limit(source, max_len))
    tokenizer = load_tokenizer(source)
    importlib.import_module("torch.nn.attention.bias")  # takes seconds, which the first prompt should not wait for
    start = time.perf_counter()
    decoder = load_model(source, device, dtype, max_len, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    size = decoder.weight_bytes
    notes.append(f"weights {size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e9 / seconds:.1f} GB/s")
    if source.note is not None:
        notes.insert(0, source.note)
    engine = Engine(decoder, settled)
    if prepare and device.type == "cuda":
        notes.append(str(engine.prepare()))
    return Loaded(engine, source, tokenizer, settled, notes, seconds, size)


def _limit(source: ModelSource, max_len: int) -> str:
    """Why the context is what it is, when that is not the model's own limit."""
    limit = source.config.max_position
    if limit is None:
        return ": random weights have no limit"
    return f": cut from the model's {limit}" if max_len < limit else ""


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
