"""Owns a folder's safetensors files: which tensor lies in which file, whether all are there, and the way onto the device.

Does not own where a tensor goes in the decoder (layout). The safetensors library checks headers, offsets and sizes; no other
file format is ever opened.
"""

import logging
import stat
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
from models.layout import EMBEDDING, LM_HEAD, Piece, part
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
    """A stored tensor: the file that holds it, its name there, its shape and its type in safetensors' spelling."""

    file: Path
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
        self._handles: dict[Path, Any] = {}
        self.unused: list[str] = []
        self.entries: dict[str, Entry] = {}
        if (path / INDEX).is_file():
            if (path / SINGLE).exists():
                log.warning("%s: %s is ignored: the index %s names the files to read", path, SINGLE, INDEX)
            self._read_index()
        elif (path / SINGLE).exists():
            self.entries = self._open(path / SINGLE)
        else:
            other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
            found = f"; {other[0]} is of a format that is never opened, convert it to safetensors" if other else ""
            raise CheckpointError(f"{path} has no weights: neither {SINGLE} nor {INDEX}{found}")

    @property
    def dtype(self) -> str:
        """The run's dtype that keeps most of what is stored: that of the largest share of the bytes."""
        sizes: Counter[str] = Counter()
        for entry in self.entries.values():
            if entry.dtype in DTYPES:
                sizes[DTYPES[entry.dtype]] += torch.Size(entry.shape).numel()
        return sizes.most_common(1)[0][0] if sizes else "bfloat16"

    def settle(self, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        """The config with what the files alone can tell (dtype, tied or not), and a sentence for each surprise."""
        notes = []
        if self.dtype != config.dtype:
            notes.append(f"the config says {config.dtype} and the weights are {self.dtype}, which is kept")
        tied = config.tied
        if tied and EMBEDDING in self.entries and LM_HEAD in self.entries:
            tied = torch.equal(self.tensor(EMBEDDING), self.tensor(LM_HEAD))
            if not tied:
                notes.append(f"tie_word_embeddings is true but {LM_HEAD} holds other values: both are used, as in transformers")
        elif tied and LM_HEAD in self.entries:
            self.entries[EMBEDDING] = self.entries.pop(LM_HEAD)
            notes.append(f"{EMBEDDING} is not stored and tied: {LM_HEAD} is used for both")
        return replace(config, dtype=self.dtype, tied=tied), notes

    def check(self, table: list[Piece], tied: bool) -> list[str]:
        """Compare the files with what the decoder is made of.

        Returns:
            Names of stored tensors that nothing uses.

        Raises:
            CheckpointError: a tensor is missing or has another shape; the message names it.
            UnsupportedModelError: a tensor's type is not one that is run.
        """
        missing = [piece.source for piece in table if piece.source not in self.entries]
        if missing:
            raise CheckpointError(f"{self.path}: {_some(missing)} missing from the weight files")
        for piece in table:
            entry = self.entries[piece.source]
            if entry.shape != piece.shape:
                raise CheckpointError(
                    f"{entry.file}: {piece.source} has shape {list(entry.shape)} and config.json asks for {list(piece.shape)}"
                )
            if entry.dtype not in DTYPES:
                allowed = ", ".join(DTYPES)
                raise UnsupportedModelError(f"{entry.file}: {piece.source} is stored as {entry.dtype}; Quartet reads {allowed}")
        used = {piece.source for piece in table} | ({LM_HEAD} if tied else set())
        stray = [name for name in self.entries if name not in used and not name.endswith("rotary_emb.inv_freq")]
        return self.unused + stray

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, mapped from its file."""
        entry = self.entries[name]
        try:
            return self._handles[entry.file].get_tensor(entry.name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{entry.file}: {name} cannot be read: {error}") from error

    def copy_into(self, targets: dict[str, Tensor], table: list[Piece], advance: Callable[[int], None]) -> None:
        """Fill the targets; types are converted on the way. `advance` is told the bytes filled, from several threads."""
        device = next(iter(targets.values())).device
        if device.type != "cuda":
            for piece in table:
                target = part(targets, piece)
                target.copy_(self.tensor(piece.source))
                advance(target.nbytes)
            return
        thread = threading.local()

        def start() -> None:
            thread.staging = _Staging(device)

        def fill(piece: Piece) -> None:
            target = part(targets, piece)
            thread.staging.copy(self.tensor(piece.source), target)
            advance(target.nbytes)

        with ThreadPoolExecutor(THREADS, "weights", start) as pool:
            list(pool.map(fill, table))

    def _read_index(self) -> None:
        weight_map = Fields.read(self.path / INDEX).table("weight_map")
        files: dict[str, dict[str, Entry]] = {}
        for name, file in weight_map.items():
            if file not in files:
                files[file] = self._open(self._inside(file, name))
            if name not in files[file]:
                raise CheckpointError(f"{self.path / INDEX} puts {name} into {file}, which does not hold it")
            self.entries[name] = files[file][name]
        self.unused = [name for held in files.values() for name in held if name not in weight_map]

    def _inside(self, file: Any, name: str) -> Path:
        """The path of an index entry, which as written must lie in the folder. A link may lead out, as the hub's cache does."""
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{self.path / INDEX}: the entry of {name} is {file!r}; it must name a .safetensors file")
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or ":" in file:
            raise CheckpointError(f"{self.path / INDEX}: the entry of {name} is {file!r}, which leaves the model folder")
        return self.path / pure

    def _open(self, file: Path) -> dict[str, Entry]:
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise CheckpointError(f"{file} is not a regular file")
            handle: Any = safe_open(file, framework="pt", device="cpu")
            found = {}
            for name in list(handle.keys()):
                view = handle.get_slice(name)
                found[name] = Entry(file, name, tuple(view.get_shape()), view.get_dtype())
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing, and {INDEX} names it") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} is damaged or no safetensors file: {error}") from error
        self._handles[file] = handle
        return found


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


def _some(names: list[str]) -> str:
    """Up to three names and how many more."""
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " is" if len(names) == 1 else " are"
    return ", ".join(names[:3]) + more
