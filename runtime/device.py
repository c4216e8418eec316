"""Owns what this machine can do: settles every `auto` of an EngineConfig and reads free memory. Does not allocate anything."""

import importlib.util
from dataclasses import replace

import psutil
import torch

from runtime.config import EngineConfig, OpsName, Switch
from runtime.errors import ConfigError


def resolve(config: EngineConfig, stored_dtype: str) -> tuple[EngineConfig, list[str]]:
    """Settle device, dtype, ops, graph and pdl on this machine.

    Args:
        config: the user's wishes.
        stored_dtype: the checkpoint's dtype, which "auto" keeps.

    Returns:
        The config without any "auto" in those five fields, and one sentence for each choice made. Only graph stays "auto" on
        CUDA: on, unless a capture fails.

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
    fast = device == "cuda"
    for field, wish, what in (
        ("ops", "fused", "fused kernels run"),
        ("graph", "on", "graphs are captured"),
        ("pdl", "on", "PDL works"),
    ):
        if not fast and getattr(config, field) == wish:
            raise ConfigError(f"{field} {wish} was asked for and {what} only on a CUDA device; use --{field} auto")
    ops: OpsName = config.ops if config.ops != "auto" else "fused" if fast else "unfused"
    graph: Switch = config.graph if config.graph != "auto" or fast else "off"
    hopper = fast and torch.cuda.get_device_capability() >= (9, 0)
    if config.pdl == "on" and not hopper:
        raise ConfigError(
            f"pdl on was asked for and {describe(torch.device(device))} has none (Hopper and newer do); use --pdl auto"
        )
    pdl: Switch = "on" if hopper and config.pdl != "off" else "off"
    notes.append(f"ops {ops}, graph {'off' if graph == 'off' else 'on'}, pdl {pdl}" + ("" if fast else ": no CUDA device"))
    return replace(config, device=device, dtype=dtype, ops=ops, graph=graph, pdl=pdl), notes


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
