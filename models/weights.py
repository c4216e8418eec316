"""Owns a folder's safetensors files: which tensor lies in which file, whether all are there, and the way onto the device.

Does not own where a tensor goes in the decoder (layout). The safetensors library checks headers, offsets and sizes; no other
file format is ever opened.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import ModelConfig
from models.fields import Fields
from models.layout import EMBEDDING, LM_HEAD, Piece, part, pieces
from runtime.errors import CheckpointError, UnsupportedModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
"""Stored types that are read, and the run's dtype that keeps them best."""

STAGING_BYTES = 16 << 20
THREADS = 8
"""Copies in flight to a GPU. One thread alone is held back by the page faults of the mapped file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its open file, its name there, its shape and its type in safetensors' spelling."""

    file: Path
    handle: Any
    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of a model folder. Files are mapped, not read, until `copy_into`.

    Args:
        path: the folder. An index says which file holds a tensor; without one, model.safetensors is all there is.

    Raises:
        CheckpointError: no weights, a file absent or damaged, or an index that contradicts its files or leaves the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._unlisted: list[str] = []
        if (path / INDEX).is_file():
            if (path / SINGLE).exists():
                log.warning("%s: %s is ignored: the index %s names the files to read", path, SINGLE, INDEX)
            self._read_index()
        elif (path / SINGLE).exists():
            self.entries = _open(path / SINGLE)
        else:
            other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
            found = f"; {other[0]} is of a format that is never opened, convert it to safetensors" if other else ""
            raise CheckpointError(f"{path} has no weights: neither {SINGLE} nor {INDEX}{found}")

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
                sizes[DTYPES[entry.dtype]] += math.prod(entry.shape)
        dtype = max(sizes, key=sizes.__getitem__, default="bfloat16")
        notes = []
        if dtype != config.dtype:
            notes.append(f"the config says {config.dtype} and the weights are {dtype}, which is kept")
        tied = config.tied
        if tied and EMBEDDING in self.entries and LM_HEAD in self.entries:
            tied = torch.equal(self.tensor(EMBEDDING), self.tensor(LM_HEAD))
            if not tied:
                notes.append(f"tie_word_embeddings is true but {LM_HEAD} holds other values: both are used, as in transformers")
        elif tied and LM_HEAD in self.entries:
            self.entries[EMBEDDING] = self.entries.pop(LM_HEAD)
            notes.append(f"{EMBEDDING} is not stored and tied: {LM_HEAD} is used for both")
        settled = replace(config, dtype=dtype, tied=tied)
        table = pieces(settled)
        self._check(table)
        used = {piece.source for piece in table} | ({LM_HEAD} if tied else set())
        stray = [name for name in self.entries if name not in used and not name.endswith("rotary_emb.inv_freq")]
        notes += [f"tensor {name} is not part of the model and is left out" for name in self._unlisted + stray]
        return settled, notes

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, mapped from its file."""
        entry = self.entries[name]
        try:
            return entry.handle.get_tensor(entry.name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{entry.file}: {name} cannot be read: {error}") from error

    def copy_into(self, targets: dict[str, Tensor], table: list[Piece], advance: Callable[[int], None]) -> None:
        """Fill the targets; types are converted on the way. `advance` is told the bytes filled, from several threads."""
        device = next(iter(targets.values())).device
        thread = threading.local()

        def start() -> None:
            thread.staging = _Staging(device)

        def fill(piece: Piece) -> None:
            target, source = part(targets, piece), self.tensor(piece.source)
            if device.type == "cuda":
                thread.staging.copy(source, target)
            else:
                target.copy_(source)
            advance(target.nbytes)

        if device.type == "cuda":
            with ThreadPoolExecutor(THREADS, "weights", start) as pool:
                list(pool.map(fill, table))
        else:
            for piece in table:
                fill(piece)

    def _check(self, table: list[Piece]) -> None:
        """Every piece must be there, in the shape that the config asks for and a type that is read."""
        missing = [piece.source for piece in table if piece.source not in self.entries]
        if missing:
            more = f" and {len(missing) - 3} more are" if len(missing) > 3 else " is" if len(missing) == 1 else " are"
            raise CheckpointError(f"{self.path}: {', '.join(missing[:3])}{more} missing from the weight files")
        for piece in table:
            entry = self.entries[piece.source]
            if entry.shape != piece.shape:
                raise CheckpointError(
                    f"{entry.file}: {piece.source} has shape {list(entry.shape)} and config.json asks for {list(piece.shape)}"
                )
            if entry.dtype not in DTYPES:
                allowed = ", ".join(DTYPES)
                raise UnsupportedModelError(f"{entry.file}: {piece.source} is stored as {entry.dtype}; Quartet reads {allowed}")

    def _read_index(self) -> None:
        weight_map = Fields.read(self.path / INDEX).get("weight_map", dict, {})
        files: dict[str, dict[str, Entry]] = {}
        for name, file in weight_map.items():
            where = f"{self.path / INDEX}: the entry of {name} is {file!r}"
            if not isinstance(file, str) or not file.endswith(".safetensors"):
                raise CheckpointError(f"{where}; it must name a .safetensors file")
            # As written it must lie in the folder; a link there may lead out, as in the hub's cache.
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file or ":" in file:
                raise CheckpointError(f"{where}, which leaves the model folder")
            if file not in files:
                files[file] = _open(self.path / file)
            if name not in files[file]:
                raise CheckpointError(f"{self.path / INDEX} puts {name} into {file}, which does not hold it")
            self.entries[name] = files[file][name]
        self._unlisted = [name for held in files.values() for name in held if name not in weight_map]


def _open(file: Path) -> dict[str, Entry]:
    """The tensors of one file, by name."""
    if not file.exists():
        raise CheckpointError(f"{file} is missing, and {INDEX} names it")
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file")
    try:
        handle: Any = safe_open(file, framework="pt", device="cpu")
        views = {name: handle.get_slice(name) for name in list(handle.keys())}
        return {name: Entry(file, handle, name, tuple(v.get_shape()), v.get_dtype()) for name, v in views.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or no safetensors file: {error}") from error


class _Staging:
    """One thread's way onto a GPU: a pinned buffer and a stream, so that copies of several threads overlap."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the targets may lie where earlier work is not yet done

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy source to target through the buffer, some rows at a time; returns when it has landed."""
        row_bytes = source.nbytes // len(source)
        rows = max(1, STAGING_BYTES // row_bytes)
        for some, into in zip(source.split(rows), target.split(rows), strict=True):
            if some.nbytes > STAGING_BYTES:
                into.copy_(some)
                continue
            staged = self._buffer[: some.nbytes]
            # NumPy copies in this thread alone; torch would wake a pool of its own in each of ours.
            np.copyto(staged.numpy(), some.reshape(-1).view(torch.uint8).numpy())
            with torch.cuda.stream(self._stream):
                into.copy_(staged.view(some.dtype).view(some.shape), non_blocking=True)
            self._stream.synchronize()
