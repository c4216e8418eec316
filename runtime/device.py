"""Owns what this machine can do: settles every `auto` of an EngineConfig, reads memory figures, knows datasheets' read rates.

Does not allocate or measure anything.
"""

import importlib.util
import re
from dataclasses import replace

import psutil
import torch

from runtime.config import EngineConfig, OpsName, Switch
from runtime.errors import ConfigError

DATASHEET_GBPS = {
    "H200": 4800,
    "H100 NVL": 3900,
    "H100 PCIe": 2000,
    "H100": 3350,
    "GH200 480GB": 4000,
    "B200": 8000,
    "A100 80GB PCIe": 1935,
    "A100-SXM4-80GB": 2039,
    "A100": 1555,
    "L40": 864,
    "L40S": 864,
    "L4": 300,
    "RTX 5090": 1792,
    "RTX 4090": 1008,
    "RTX 3090": 936,
}
"""Read and write bandwidth of NVIDIA's datasheets in GB/s, by words of the device name."""


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
    why = "the CPU has no fused kernels, no graphs and no PDL"
    if fast:
        why = f"{describe(torch.device(device))} has all three" if hopper else "PDL came with Hopper; this GPU is older"
    asked = [field for field in ("ops", "graph", "pdl") if getattr(config, field) != "auto"]
    why += f"; {' and '.join(asked)} as asked for" if asked else ""
    notes.append(f"ops {ops}, graph {'off' if graph == 'off' else 'on'}, pdl {pdl}: {why}")
    return replace(config, device=device, dtype=dtype, ops=ops, graph=graph, pdl=pdl), notes


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`: the driver's figure on CUDA, available host memory on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def used_bytes(device: torch.device) -> int:
    """Bytes this process holds on `device`: weights, caches, workspaces and graphs; on the CPU all of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)


def describe(device: torch.device) -> str:
    """The device in words, as it stands in outputs and results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def datasheet_gbps(name: str) -> float | None:
    """The datasheet's figure for a device name; the longest match of whole words decides."""
    matches = [words for words in DATASHEET_GBPS if re.search(rf"\b{words}\b", name)]
    return float(DATASHEET_GBPS[max(matches, key=len)]) if matches else None
