"""Owns what every measurement starts from and is filed under: the model loaded once for several modes, and the record of the
machine and its versions. Measures nothing.
"""

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models import Loaded, ModelSource, load_engine
from runtime.config import EngineConfig
from runtime.device import describe, resolve
from runtime.errors import ConfigError

ROOT = Path(__file__).parent.parent


def load(
    source: ModelSource, revision: str | None, wishes: Sequence[EngineConfig], needed: int
) -> tuple[Loaded, list[tuple[str, str]]]:
    """Load a model once for several combinations of ops and graph; what is impossible is told before a byte is read.

    Args:
        source: what was found; with path None its shapes get random weights.
        wishes: one for each combination; they differ in ops and graph only.
        needed: positions a slot must hold; the context is made this long unless max_len asks for more.

    Returns:
        The model, and each different mode in order: ops set, and graph "on" or "off".

    Raises:
        QuartetError: as `models.load_engine`, or a context that is too short.
    """
    limit = source.config.max_position
    if limit is not None and needed > limit:
        raise ConfigError(f"{needed} positions are needed and {source.label} has {limit}; ask for fewer")
    settled = [resolve(wish, source.config.dtype)[0] for wish in wishes]
    loaded = load_engine(source.name, wishes[0], revision, random_weights=source.path is None, needed_len=max(needed, 2))
    return loaded, list(dict.fromkeys((each.ops, "off" if each.graph == "off" else "on") for each in settled))


def require_folder(path: Path | None, flag: str) -> None:
    """Raises ConfigError if a file to be written has no folder to lie in: it should be told before hours of work, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder does not exist; make it first")


def environment(loaded: Loaded, model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """GPU, driver, clocks now, versions, commit, and what was asked for; None for what is not there."""
    device = torch.device(loaded.config.device)
    cuda = device.type == "cuda"
    # The first GPU: nvidia-smi does not know which ones CUDA_VISIBLE_DEVICES hides.
    query = "--query-gpu=driver_version,clocks.current.sm,clocks.current.memory"
    told = _output("nvidia-smi", query, "--format=csv,noheader") if cuda else None
    driver, sm, memory = told.splitlines()[0].split(", ") if told else (None, None, None)
    status = _output("git", "-C", str(ROOT), "status", "--porcelain")
    return {
        "device": describe(device),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "driver": driver,
        "clocks_mhz": {"sm": sm, "memory": memory} if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "commit_is_modified": None if status is None else bool(status),
        "model": model,
        "dtype": loaded.config.dtype,
        "flags": flags,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
