"""Owns what this machine can do: settles every `auto` of an EngineConfig and reads free memory. Does not allocate anything."""

import importlib.util
from dataclasses import replace

import psutil
import torch

from runtime.config import EngineConfig
from runtime.errors import ConfigError


def resolve(config: EngineConfig, stored_dtype: str) -> tuple[EngineConfig, list[str]]:
    """Settle device, dtype, ops, graph and pdl on this machine.

    Args:
        config: the user's wishes.
        stored_dtype: the checkpoint's dtype, which "auto" keeps.

    Returns:
        The config without any "auto" in those five fields, and one sentence for each choice made.

    Raises:
        ConfigError: an explicit wish that this machine cannot meet.
    """
    notes = []
    cuda = torch.cuda.is_available()
    device = config.device
    if device == "auto":
        device = "cuda" if cuda else "cpu"
        notes.append(f"device {device}" + ("" if cuda else ": no CUDA device found"))
    elif device == "cuda" and not cuda:
        raise ConfigError("device cuda was asked for and torch finds no CUDA device; use --device cpu or auto")
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("running on CUDA needs Triton and it is not installed; `pip install triton` or use --device cpu")
    dtype = stored_dtype if config.dtype == "auto" else config.dtype
    notes.append(f"dtype {dtype}" + (": as stored in the checkpoint" if config.dtype == "auto" else ""))
    if config.ops == "fused":
        raise ConfigError("ops fused was asked for and this build has no fused kernels; use --ops unfused or auto")
    if config.graph == "on":
        raise ConfigError("graph on was asked for and this build captures no graphs; use --graph off or auto")
    if config.pdl == "on":
        raise ConfigError("pdl on was asked for and only fused kernels can use it; use --pdl off or auto")
    notes.append("ops unfused, graph off: this build has the reference path only")
    return replace(config, device=device, dtype=dtype, ops="unfused", graph="off", pdl="off"), notes


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`: the driver's figure on CUDA, available host memory on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def describe(device: torch.device) -> str:
    """The device in words, as it stands in outputs and results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
