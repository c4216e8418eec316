"""Owns stored tensors one by one: which safetensors files a folder has, what lies in one, and the reading of rows.

Does not own what a model needs of them (weights) or GGUF (gguf). The safetensors library checks headers, offsets and sizes
before a byte is read; pickles are never opened.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.fields import Fields, one_line, short
from runtime.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

PACKED = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "I64": torch.int64}
"""Stored types that only quantized checkpoints have."""

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Stored types that are read. A run keeps them, but for float64, which becomes float32."""


@dataclass(frozen=True)
class Entry:
    """A stored tensor.

    Attributes:
        file: where it lies, for messages.
        shape, dtype: as stored; dtype in safetensors' spelling.
        read: (first, last, buffer) -> rows first to last on the host, in the uint8 buffer or not; None: headers alone are here.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int, Tensor], Tensor] | None = None

    @property
    def row_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape[1:])


def file_names(path: Path) -> list[str]:
    """The weight files of a folder, there or not: those its index names, else model.safetensors.

    Raises:
        CheckpointError: an entry of the index that names no file of the folder.
    """
    if not (path / INDEX).is_file():
        return [SINGLE]
    weight_map = Fields.read(path / INDEX).get("weight_map", dict, {})
    for name, file in weight_map.items():
        where = f"{path / INDEX}: the entry of {name:.200} is {short(file)}"
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{where}; it must name a .safetensors file")
        # As written it must lie in the folder; a link there may lead out, as in the hub's cache.
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file or ":" in file:
            raise CheckpointError(f"{where}, which leaves the model folder")
    return list(dict.fromkeys(weight_map.values()))


def open_file(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, by name.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        if not file.exists():
            raise CheckpointError(_missing(file))
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file")
        with safe_open(file, framework="pt", device="cpu"):
            pass  # the library holds header, shapes, types and offsets against each other and the file's size
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or no safetensors file: {one_line(error)}") from error
    header.pop("__metadata__", None)
    return {name: _entry(file, 8 + size + info["data_offsets"][0], info) for name, info in header.items()}


def _missing(file: Path) -> str:
    """What to say of a weight file that is not there."""
    if file.name != SINGLE or (file.parent / INDEX).is_file():
        return f"{file} is missing, and {INDEX} names it; fetch it again or complete the copy"
    others = sorted(other.name for kind in ("gguf", "bin", "pt", "pth") for other in file.parent.glob(f"*.{kind}"))
    what = "load the model with transformers and save_pretrained it, or take a repository that has safetensors"
    if others and others[0].endswith(".gguf"):
        what = f"give the path of {others[0]} itself"
    elif others:
        what = f"{others[0]} is of a format that is never opened, {what}"
    return f"{file.parent} has no weights: neither {SINGLE} nor {INDEX}; {what}"


def _entry(file: Path, offset: int, info: dict[str, Any]) -> Entry:
    shape, name = tuple(info["shape"]), info["dtype"]
    dtype = (DTYPES | PACKED).get(name)
    if dtype is None or 0 in shape:
        return Entry(str(file), shape, name)
    row_bytes = dtype.itemsize * math.prod(shape[1:])

    def read(first: int, last: int, buffer: Tensor) -> Tensor:
        rows = buffer[: (last - first) * row_bytes]
        try:
            with file.open("rb", buffering=0) as opened:
                opened.seek(offset + first * row_bytes)
                found = opened.readinto(rows.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        if found != len(rows):
            raise CheckpointError(f"{file} is shorter than when it was opened; is it still being written?")
        return rows.view(dtype).view(last - first, *shape[1:])

    return Entry(str(file), shape, name, read)
