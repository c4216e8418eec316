"""Owns the way from a model's name to an engine that runs it. Does not own finding (source) or reading (weights)."""

import importlib
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from models.decoder import Decoder
from models.gguf import open_gguf
from models.gguf_tokenizer import save_tokenizer
from models.layout import allocate, pieces
from models.quantized import allocate_lowbit, settle_weights
from models.random_weights import fill_randomly
from models.source import ModelSource
from models.tokenizer import Tokenizer
from models.weights import WeightFiles
from runtime.config import EngineConfig
from runtime.device import describe, free_bytes, resolve
from runtime.engine import Engine
from runtime.errors import ConfigError
from runtime.kv_cache import RESERVE_BYTES, fit_max_len

ROOMY = 4096
"""Positions that a slot should hold, where the model can, before there are more slots."""

FP8_CAPABILITY = (8, 9)
"""The oldest GPUs that convert e4m3 in hardware."""

QUIET_BYTES = 1 << 30
"""What takes less than this needs no word where there is no progress bar."""


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


def load_model(source: ModelSource, device: torch.device, dtype: torch.dtype, max_len: int, weights: str = "bf16") -> Decoder:
    """The decoder on its device with weights read or made there, the projections dense ("bf16"), in "fp8" or in "int4", and
    rotary tables for `max_len` positions. A bar on stderr shows the bytes done where that is a terminal.

    Raises:
        CheckpointError: a weight file that is missing, damaged or does not fit the config.
        OutOfMemoryError: the device cannot hold the weights.
    """
    files = None
    if source.path is not None:
        files = open_gguf(source.path).weights() if source.path.is_file() else WeightFiles.of_folder(source.path)
        files.settle(source.config)
    table = pieces(source.config)
    stored = source.config.stored
    targets: dict[str, Any] = (
        dict(allocate(table, device, dtype)) if weights == "bf16" else allocate_lowbit(table, weights, stored, device, dtype)
    )
    total = sum(target.nbytes for target in targets.values())
    title = f"{'loading' if files else 'making'} {source.label}"
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        if bar.disable and total > QUIET_BYTES:
            print(f"{title}, {total / 1e9:.1f} GB ...", file=sys.stderr, flush=True)
        if files is None:
            fill_randomly(targets, table, bar.update)
        else:
            files.copy_into(targets, table, bar.update, stored)
    return Decoder(source.config, targets, max_len)


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> Tokenizer | None:
    """The model's tokenizer, see `Tokenizer`; None for random weights."""
    if source.path is None or source.path.is_dir():
        return None if source.path is None else Tokenizer(source.path, chat_template)
    with TemporaryDirectory() as folder:
        save_tokenizer(source.path, open_gguf(source.path).fields, Path(folder))
        return Tokenizer(Path(folder), chat_template)


def load_engine(
    source: ModelSource,
    config: EngineConfig,
    needed_len: int | None = None,
    prepare: bool = True,
    tokenizer: Tokenizer | None = None,
) -> Loaded:
    """Settle the config on this machine, load a model that was found and build its engine.

    Args:
        needed_len: positions the command needs; the capacity where config.max_len is None, the least it may be otherwise.
        prepare: compile kernels and capture graphs now; else the caller plays `Engine.prepare` before the first request.
        tokenizer: the model's, to be handed on; None where ids are all that is played.

    Raises:
        QuartetError: as `resolve`, `fit_max_len` and `load_model`, in this order.
    """
    if config.max_len is not None and needed_len is not None and needed_len > config.max_len:
        raise ConfigError(f"{needed_len} positions are needed and max_len is {config.max_len}; raise --max-len")
    settled, choices = resolve(config, source.config.dtype)
    weights = settle_weights(settled.weights, source.config.stored)
    settled = replace(settled, weights=weights)
    device, dtype = torch.device(settled.device), getattr(torch, settled.dtype)
    if weights == "fp8" and settled.ops == "fused" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"fused ops multiply fp8 weights in hardware and {describe(device)} is older than Ada; use --weights int4"
        )
    limit, free = source.config.max_position, free_bytes(device)
    slots, weight_bytes = settled.max_slots, source.config.weight_bytes(settled.dtype, weights)
    kv_bytes, table_bytes = source.config.kv_bytes_per_position(settled.dtype), 4 * source.config.head_dim
    if config.max_len is None and needed_len is None:
        left = free - weight_bytes - RESERVE_BYTES
        slots = max(1, min(slots, left // (kv_bytes * min(limit or ROOMY, ROOMY))))
    max_len = fit_max_len(
        config.max_len if config.max_len is not None else needed_len,
        limit,
        slots,
        kv_bytes + -(-table_bytes // slots),  # the rotary tables grow with the length too, once for all slots
        weight_bytes,
        free,
    )
    settled = replace(settled, max_len=max_len, max_slots=slots)
    if device.type == "cuda":  # prefill's mask there takes seconds to import, which the first prompt should not wait for
        importlib.import_module("torch.nn.attention.bias")
    start = time.perf_counter()
    decoder = load_model(source, device, dtype, max_len, weights)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, size = time.perf_counter() - start, decoder.weight_bytes
    why = ": random weights have no limit" if limit is None else f": cut from the model's {limit}" if max_len < limit else ""
    why += (
        f"; {config.max_slots} slots of {min(limit or ROOMY, ROOMY)} positions do not fit" if slots < config.max_slots else ""
    )
    packed = "" if weights == "bf16" else f"{weights}, "
    notes = [
        *([] if source.note is None else [source.note]),
        *choices,
        f"context {max_len} positions in each of {slots} {'slot' if slots == 1 else 'slots'}{why}",
        f"weights {packed}{size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e9 / seconds:.1f} GB/s",
    ]
    if packed and device.type == "cpu":
        notes.append("weights of 8 and 4 bits save memory on a CPU and cost time: each step makes them dense again")
    engine = Engine(decoder, settled)
    if prepare and device.type == "cuda":
        notes.append(str(engine.prepare()))
    return Loaded(engine, source, tokenizer, settled, notes, seconds, size)
