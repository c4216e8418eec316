"""Owns the record of what a result was measured on: hardware, versions, commit. Does not measure anything."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from runtime.device import describe

ROOT = Path(__file__).parent.parent


def environment(device: torch.device) -> dict[str, Any]:
    """GPU, driver, versions and commit; None for what is not there."""
    return {
        "device": describe(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": _nvidia_smi("driver_version") if device.type == "cuda" else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": _git("rev-parse", "HEAD"),
        "commit_is_modified": bool(status) if (status := _git("status", "--porcelain")) is not None else None,
    }


def clocks_mhz(device: torch.device) -> dict[str, str | None] | None:
    """SM and memory clocks at this moment, as nvidia-smi tells them; None on a CPU."""
    if device.type != "cuda":
        return None
    return {"sm": _nvidia_smi("clocks.current.sm"), "memory": _nvidia_smi("clocks.current.memory")}


def peak_process_bytes() -> int | None:
    """Most host memory this process has held; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    return _output("git", "-C", str(ROOT), *words)


def _nvidia_smi(field: str) -> str | None:
    """The field of the first GPU: nvidia-smi does not know which ones CUDA_VISIBLE_DEVICES hides."""
    text = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
