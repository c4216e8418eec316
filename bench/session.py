"""Owns what every measurement starts from and is filed under: the model loaded once for several modes, what a start costs, and
the record of the machine and its versions. Does not own what is done in a start (models.load, Engine.prepare).
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from models import Loaded, ModelSource, find_model, load_engine, load_tokenizer
from runtime.config import EngineConfig
from runtime.device import describe, resolve
from runtime.errors import ConfigError

ROOT = Path(__file__).parent.parent

SLOWED_BY = ["idle", "application clocks", "software power cap", "hardware slowdown", "sync boost", "software thermal"]
SLOWED_BY += ["hardware thermal", "power brake", "display clocks"]
"""NVML's clock event reasons, lowest bit first. Source: nvml.h, nvmlClocksEventReasons."""
START_SECONDS = 120


def load(source: ModelSource, wishes: Sequence[EngineConfig], needed: int) -> tuple[Loaded, list[tuple[str, str]]]:
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
    loaded = load_engine(source, wishes[0], needed_len=max(needed, 2), prepare=False)
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
    asked = {"sm_mhz": "clocks.current.sm", "memory_mhz": "clocks.current.memory"}
    asked |= {"temperature_c": "temperature.gpu", "power_w": "power.draw"}
    fields = ",".join(["driver_version", *asked.values(), "clocks_event_reasons.active"])
    told = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if not told:
        return None
    driver, *figures, reasons = told.splitlines()[0].split(", ")
    numbers = {name: _float(word) for name, word in zip(asked, figures, strict=True)}
    return {"driver": driver, **numbers, "slowed_by": slowed_by(reasons)}


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
    return [word for bit, word in enumerate(SLOWED_BY) if mask >> bit & 1]


def playing(code: str) -> list[str]:
    """The command of a process that plays Python code of ours, whatever packages the current folder has."""
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]


def start_costs(model: str, revision: str | None, random_weights: bool, config: EngineConfig) -> dict[str, Any]:
    """For "cold" and "warm": ready_seconds from spawning a process, of which load, compile and capture; or what went wrong.

    Weights read from disk come from the page cache both times where this process has just read them.
    """
    asked = (model, revision, random_weights, asdict(config))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            # `env` sets the variable: only doors read the environment here.
            command = ["env", f"TRITON_CACHE_DIR={folder}", *playing(f"from bench.session import ready; ready(*{asked!r})")]
            start = time.perf_counter()
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=True)
                found[name] = json.loads(done.stdout.splitlines()[-1]) | {"process_seconds": time.perf_counter() - start}
            except subprocess.TimeoutExpired:
                found[name] = {"error": f"not ready after {START_SECONDS} s"}
            except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
                said = getattr(error, "stderr", None) or str(error)
                found[name] = {"error": said.strip().splitlines()[-1]}
    return found


def ready(model: str, revision: str | None, random_weights: bool, config: dict[str, Any]) -> None:
    """Start as a door does and print the seconds; for the process that `start_costs` spawns."""
    spawned = psutil.Process().create_time()
    source = find_model(model, revision, random_weights=random_weights)
    loaded = load_engine(source, EngineConfig(**config), prepare=False, tokenizer=load_tokenizer(source))
    prepared = loaded.engine.prepare()
    print(
        json.dumps({"ready_seconds": time.time() - spawned, "load_seconds": loaded.load_seconds, **asdict(prepared)}),
        flush=True,
    )


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
