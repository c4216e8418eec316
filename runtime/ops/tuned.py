"""Owns the file of tiles that `bench kernels --tune` found on this machine's GPUs. Does not own the built-in ones (configs)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from runtime.ops.attention import AttentionTile
from runtime.ops.configs import Tile, fits

log = logging.getLogger(__name__)


class TileKey(NamedTuple):
    """What a tile is for: the kernel, "single" or "batch" rows, out and in features (F for norm_gate_up; of attention H * D and
    K * D), and the bytes of a weight or of a cached value."""

    kernel: str
    rows: str
    out: int
    width: int
    itemsize: int

    @classmethod
    def of(cls, kernel: str, batch: int, out: int, width: int, itemsize: int) -> "TileKey":
        return cls(kernel, "single" if batch == 1 else "batch", out, width, itemsize)

    def __str__(self) -> str:
        return "/".join(map(str, self))


Tiles = Mapping[TileKey, Tile | AttentionTile]


def tiles_path() -> Path:
    return user_cache_path("quartet") / "tiles.json"


def load_tuned(gpu_name: str, path: Path | None = None) -> Tiles:
    """The tiles tuned on this GPU; none without a file. A damaged file, or one of another version, is told in the log."""
    path = path or tiles_path()
    found: dict[TileKey, Tile | AttentionTile] = {}
    try:
        for name, fields in json.loads(path.read_bytes()).get(gpu_name, {}).items():
            kernel, rows, *sizes = name.split("/")
            key = TileKey(kernel, rows, *map(int, sizes))
            found[key] = tile = AttentionTile(**fields) if kernel == "attention" else Tile(**fields)
            if isinstance(tile, Tile) and not fits(tile, key.kernel, key.out, key.width, key.rows == "single", key.itemsize):
                raise ValueError(f"{name} cannot be cut by {tile}")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("tuned tiles in %s cannot be read (%s): built-in ones play; `bench kernels --tune` writes it", path, error)
        return {}
    return found


def save_tuned(gpu_name: str, found: Tiles, path: Path | None = None) -> Path:
    """Write tiles beside what the file holds of other GPUs and of other keys, if it can be read; the file's path."""
    path = path or tiles_path()
    try:
        everything = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        everything = {}
    mine = {str(key): asdict(tile) for key, tile in {**load_tuned(gpu_name, path), **found}.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(everything | {gpu_name: mine}, indent=1))
    temporary.replace(path)
    return path
