"""Owns the tensors of a model as stored: which lies in which file, whether all are there, and the way onto the device.

Does not own where a tensor goes in the decoder (layout) or how one is stored (stored, gguf).
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.fields import Fields
from models.layout import EMBEDDING, LM_HEAD, Piece, part, pieces
from models.quantized import check_projections, fill_projection, is_projection
from models.scheme import Stored
from models.stored import DTYPES, INDEX, PACKED, SINGLE, Entry, file_names, open_file
from runtime.errors import CheckpointError, UnsupportedModelError
from runtime.ops.lowbit import BLOCK_ROWS, LowBit

BUFFER_BYTES = 4 << 20
THREADS = 8
"""Reads in flight, each into a buffer of its own that is pinned for a GPU and used again. Small and few, since memory that is
touched for the first time is slow; a mapped file would be touched page by page."""

log = logging.getLogger(__name__)


class WeightFiles:
    """The tensors of a model, not read until `copy_into`.

    Args:
        where: the model, for messages.
        entries: the tensors by name.
        unlisted: tensors that lie in its files and that its index does not name.
    """

    def __init__(self, where: str, entries: dict[str, Entry], unlisted: Iterable[str] = ()) -> None:
        self.where = where
        self.entries = entries
        self._unlisted = list(unlisted)

    @classmethod
    def of_folder(cls, path: Path, opened: Callable[[Path], dict[str, Entry]] = open_file) -> "WeightFiles":
        """The tensors of a folder: an index says which file holds each; without one, model.safetensors is all there is.

        Args:
            opened: tells what a file holds; another one where it lies elsewhere.

        Raises:
            CheckpointError: no weights, a file absent or damaged, or an index that contradicts its files or leaves the folder.
        """
        files = {name: opened(path / name) for name in file_names(path)}
        if not (path / INDEX).is_file():
            return cls(str(path), files[SINGLE])
        if (path / SINGLE).exists() and SINGLE not in files:
            log.warning("%s: %s is ignored: the index %s names the files to read", path, SINGLE, INDEX)
        weight_map = Fields.read(path / INDEX).get("weight_map", dict, {})
        for name, file in weight_map.items():
            if name not in files[file]:
                raise CheckpointError(f"{path / INDEX} puts {name:.200} into {file}, which does not hold it")
        entries = {name: files[file][name] for name, file in weight_map.items()}
        return cls(str(path), entries, (name for held in files.values() for name in held if name not in weight_map))

    def settle(self, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        """Hold the files against the config.

        Returns:
            The config with what the files alone can tell (dtype, tied or not), and a sentence for each surprise.

        Raises:
            CheckpointError: a tensor is missing or has another shape; the message names it.
            UnsupportedModelError: a tensor's type is not one that is run.
        """
        sizes: Counter[str] = Counter()
        for entry in self.entries.values():
            if entry.dtype in DTYPES:
                stored = torch.float32 if entry.dtype == "F64" else DTYPES[entry.dtype]
                sizes[str(stored).removeprefix("torch.")] += math.prod(entry.shape)
        dtype = max(sizes, key=sizes.__getitem__, default="bfloat16")
        notes = []
        if dtype != config.dtype:
            notes.append(f"the config says {config.dtype} and the weights are {dtype}, which is kept")
        tied = config.tied
        if tied and EMBEDDING in self.entries and LM_HEAD in self.entries:
            tied = _equal(self.entries[EMBEDDING], self.entries[LM_HEAD])
            if not tied:
                notes.append(f"tie_word_embeddings is true but {LM_HEAD} holds other values: both are used, as in transformers")
        elif tied and LM_HEAD in self.entries:
            self.entries[EMBEDDING] = self.entries.pop(LM_HEAD)
            notes.append(f"{EMBEDDING} is not stored and tied: {LM_HEAD} is used for both")
        settled = replace(config, dtype=dtype, tied=tied)
        table = pieces(settled)
        self._check([piece for piece in table if not (settled.stored and is_projection(piece.target))])
        used = {piece.source for piece in table} | ({LM_HEAD} if tied else set())
        if settled.stored:
            used |= check_projections(self.entries, self.where, table, settled.stored)
        stray = [name for name in self.entries if name not in used and not name.endswith("rotary_emb.inv_freq")]
        notes += [f"tensor {name:.200} is not part of the model and is left out" for name in self._unlisted + stray]
        return settled, notes

    def copy_into(
        self, targets: dict[str, Any], table: list[Piece], advance: Callable[[int], None], stored: Stored | None = None
    ) -> None:
        """Fill the targets; types are converted on the way. `advance` is told the bytes filled, from several threads.
        `stored`: how the files hold the projections."""
        device = targets[EMBEDDING].device
        dense = [piece for piece in table if not (stored and is_projection(piece.target))]
        least = BLOCK_ROWS if any(isinstance(target, LowBit) for target in targets.values()) else 1
        size = max(BUFFER_BYTES, *(least * self.entries[piece.source].row_bytes for piece in dense))
        thread = threading.local()

        def start() -> None:
            thread.lane = _Lane(device, size)

        def fill(job: tuple[Piece, int, int]) -> None:
            piece, first, last = job
            into = part(targets, piece)[first:last]
            try:
                thread.lane.fill(into, self.entries[piece.source], first, last)
            except ValueError as error:  # of a weight that cannot be rounded
                raise CheckpointError(f"{piece.source}: {error}; it cannot be quantized, use --weights bf16") from error
            advance(into.nbytes)

        with ThreadPoolExecutor(THREADS, "weights", start) as pool:
            jobs = [(piece, *rows) for piece in dense for rows in _runs(self.entries[piece.source], size)]
            list(pool.map(fill, jobs))
        for piece in table:
            if stored and is_projection(piece.target):
                fill_projection(part(targets, piece), piece, stored, self._whole, self.entries.__contains__)
                advance(part(targets, piece).nbytes)

    def _whole(self, name: str) -> Tensor:
        """A tensor of a quantized checkpoint, on the host."""
        entry = self.entries[name]
        dtype = (DTYPES | PACKED).get(entry.dtype)
        if dtype is None:
            raise UnsupportedModelError(f"{entry.file}: {name} is stored as {entry.dtype}, which no scheme that is read has")
        if entry.read is None:
            raise CheckpointError(f"{entry.file}: {name} has shape {list(entry.shape)}, which holds nothing")
        buffer = torch.empty(math.prod(entry.shape) * dtype.itemsize, dtype=torch.uint8)
        return entry.read(0, entry.shape[0] if entry.shape else 1, buffer)

    def _check(self, table: list[Piece]) -> None:
        """Every piece must be there, in the shape that the config asks for and a type that is read."""
        missing = [piece.source for piece in table if piece.source not in self.entries]
        if missing:
            more = f" and {len(missing) - 3} more are" if len(missing) > 3 else " is" if len(missing) == 1 else " are"
            raise CheckpointError(f"{self.where}: {', '.join(missing[:3])}{more} missing from the weight files")
        for piece in table:
            entry = self.entries[piece.source]
            if entry.dtype not in DTYPES:
                allowed = ", ".join(DTYPES)
                raise UnsupportedModelError(f"{entry.file}: {piece.source} is stored as {entry.dtype}; Quartet reads {allowed}")
            if entry.shape != piece.shape:
                raise CheckpointError(
                    f"{entry.file}: {piece.source} has shape {list(entry.shape)} and config.json asks for {list(piece.shape)}"
                )


def _runs(entry: Entry, size: int) -> Iterable[tuple[int, int]]:
    """First and last of the runs of rows that fill a buffer of some bytes."""
    step = size // entry.row_bytes
    step = step // BLOCK_ROWS * BLOCK_ROWS or step  # rows of 4-bit weights lie in blocks of so many
    return ((first, min(first + step, entry.shape[0])) for first in range(0, entry.shape[0], step))


def _equal(a: Entry, b: Entry) -> bool:
    """Whether two tensors hold the same values; taken to be so where only their headers are here, or are refused later."""
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in DTYPES or not a.shape or a.read is None or b.read is None:
        return a.shape == b.shape and a.dtype == b.dtype
    size = max(BUFFER_BYTES, a.row_bytes)
    ours, theirs = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    return all(torch.equal(a.read(*rows, ours), b.read(*rows, theirs)) for rows in _runs(a, size))


class _Lane:
    """One thread's way onto a device: a buffer and, for a GPU, a stream, so that several threads' copies overlap."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, cuda = device, device.type == "cuda"
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self._stream = torch.cuda.Stream(device) if cuda else None
        if self._stream is not None:  # the targets may lie where earlier work is not yet done
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def fill(self, into: Tensor, entry: Entry, first: int, last: int) -> None:
        """Read rows first to last of a tensor and copy them; returns when they have landed."""
        assert entry.read is not None
        if self._stream is None and into.dtype == DTYPES[entry.dtype]:
            entry_rows = entry.read(first, last, into.reshape(-1).view(torch.uint8))
            if entry_rows.data_ptr() != into.data_ptr():
                into.copy_(entry_rows)
            return
        rows = entry.read(first, last, self._buffer)
        with torch.cuda.stream(self._stream):  # None: this does nothing
            if rows.dtype != into.dtype:
                rows = rows.to(self._device, non_blocking=True)  # the device converts faster than one thread here
            into.copy_(rows, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
