"""Owns what every measurement starts from and is filed under: the model loaded once for several modes, and the record of the
machine and its versions. Measures nothing.
"""

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from models import Loaded, ModelSource, load_engine
from runtime.config import EngineConfig
from runtime.device import describe, resolve
from runtime.errors import ConfigError

ROOT = Path(__file__).parent.parent

SLOWED_BY = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
"""NVML's clock event reasons, by bit. Source: nvml.h, nvmlClocksEventReasons."""


def load(
    source: ModelSource, revision: str | None, wishes: Sequence[EngineConfig], needed: int
) -> tuple[Loaded, list[tuple[str, str]]]:
    """Load a model once for several combinations of ops and graph, nothing compiled or captured, and no tokenizer; what is
    impossible is told before a byte is read.

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
    made = source.path is None
    loaded = load_engine(source.name, wishes[0], revision, made, max(needed, 2), prepare=False, ids_only=True)
    return loaded, list(dict.fromkeys((each.ops, "off" if each.graph == "off" else "on") for each in settled))


def environment(
    device: torch.device,
    flags: dict[str, Any],
    model: str | None = None,
    dtype: str | None = None,
    weights: str | Sequence[str] | None = None,
) -> dict[str, Any]:
    """GPU, driver, clocks now, versions, commit, and what was asked for; None for what is not there."""
    cuda = device.type == "cuda"
    status = _output("git", "-C", str(ROOT), "status", "--porcelain")
    state = gpu_state() if cuda else None
    return {
        "device": describe(device),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "driver": state["driver"] if state else None,
        "clocks_mhz": {"sm": state["sm_mhz"], "memory": state["memory_mhz"]} if state else None,
        "cuda": torch.version.cuda if cuda else None,
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "commit_is_modified": None if status is None else bool(status),
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "flags": dict(flags),
    }


def gpu_state() -> dict[str, Any] | None:
    """The first GPU's driver, clocks in MHz, temperature, power, and what slows it now; None without nvidia-smi."""
    # The first GPU: nvidia-smi does not know which ones CUDA_VISIBLE_DEVICES hides.
    fields = "driver_version,clocks.current.sm,clocks.current.memory,temperature.gpu,power.draw"
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # new and old drivers
        told = _output("nvidia-smi", f"--query-gpu={fields},{reasons}", "--format=csv,noheader,nounits")
        if told:
            break
    else:
        return None
    driver, sm, memory, temperature, power, reasons = told.splitlines()[0].split(", ")
    return {
        "driver": driver,
        **{name: _float(word) for name, word in (("sm_mhz", sm), ("memory_mhz", memory))},
        **{name: _float(word) for name, word in (("temperature_c", temperature), ("power_w", power))},
        "slowed_by": slowed_by(reasons),
    }


def memory(device: torch.device) -> dict[str, int | None]:
    """Bytes by kind: the graphs' private pools, all that torch's allocator holds, the device's memory in use by everyone, and
    this process on the host; None where there is no such kind."""
    cuda = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if cuda else (0, 0)
    pools = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] != (0, 0)] if cuda else []
    return {
        "graph_pool": sum(each["total_size"] for each in pools) if cuda else None,
        "allocator": torch.cuda.memory_reserved(device) if cuda else None,
        "device_in_use": total - free if cuda else None,
        "process_on_host": int(psutil.Process().memory_info().rss),
    }


def slowed_by(reasons: str) -> list[str] | None:
    """The words for NVML's mask of clock event reasons, such as "0x0000000000000004"; None if it is no mask."""
    try:
        mask = int(reasons, 16)
    except ValueError:
        return None
    return [word for bit, word in SLOWED_BY.items() if mask & bit]


def _float(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


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
