"""Owns `bench launches`: what a launch costs the host and the device, as a torch op, a Triton launch, and a graph's node with
and without PDL; and what a boundary between two kernels that stream costs the memory bus. Does not own the read ceiling.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.arithmetic import Ceilings
from bench.ceiling import BLOCK, WARPS, measure_ceiling, read_kernel
from bench.output import Output, Report
from bench.session import environment
from bench.steps import Play, back_to_back_us, median, samples_us
from runtime.device import describe
from runtime.ops._triton import tl, triton

NODES = 400
CHAIN_BYTES = 2 << 30
"""Read in a chain of kernels of `MATRIX_BYTES`, a 4096 x 4096 bfloat16 matrix; far more than L2 holds."""
MATRIX_BYTES = 32 << 20
FEW = 2
"""Blocks of values a program reads of a matrix, so that it makes about a thousand programs, as a GEMV does."""


@triton.jit
def _tiny_kernel(x_ptr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(x_ptr, tl.load(x_ptr) + 1.0)


@dataclass(frozen=True)
class LaunchCost:
    """Samples of one way to launch: host_us, the host's time for one while the device only follows; each_us, the time one takes
    in a row of many, the larger of the host's and the device's. None where the host launches a whole graph."""

    name: str
    host_us: list[float] | None
    each_us: list[float]


def measure(device: torch.device) -> list[LaunchCost]:
    """Every way to launch that this device has; a second or so."""
    x = torch.zeros(1, device=device)

    def tiny() -> None:
        _tiny_kernel[(1,)](x, PDL=False, num_warps=1)

    def tiny_pdl() -> None:
        _tiny_kernel[(1,)](x, PDL=True, num_warps=1, launch_pdl=True)

    def node(name: str, play: Play) -> LaunchCost:
        return LaunchCost(name, None, [us / NODES for us in samples_us(graph_of(play, NODES), device)])

    costs = [_launched("torch op", lambda: x.add_(1.0), device)]
    if device.type == "cuda":
        costs += [_launched("Triton launch", tiny, device), node("graph node", tiny)]
        if torch.cuda.get_device_capability(device) >= (9, 0):
            costs.append(node("graph node with PDL", tiny_pdl))
        costs.append(_launched("graph of one node", graph_of(tiny, 1), device))
    return costs


def measure_ceilings(device: torch.device) -> Ceilings:
    """The ceilings of this device that a prediction needs, measured now; a few seconds."""
    gbps, us = measure_ceiling(device).measured_gbps, {cost.name: median(cost.each_us) for cost in measure(device)}
    host, cuda = us["torch op"], device.type == "cuda"
    boundary = boundary_us(device, gbps, pdl=False) if cuda else 0.0
    found = Ceilings(
        read_gbps=gbps,
        copy_gbps=copy_gbps(device),
        tflops=tflops(device),
        torch_us=host,
        triton_us=us.get("Triton launch", host),
        node_us=us.get("graph node", host),
        node_pdl_us=us.get("graph node with PDL", us.get("graph node", host)),
        boundary_us=boundary,
        boundary_pdl_us=boundary_us(device, gbps, pdl=True) if "graph node with PDL" in us else boundary,
        source="measured now" + ("" if cuda else " on the CPU, where a launch is a call of a torch op"),
    )
    torch.cuda.empty_cache()  # gigabytes, which a model may need
    return found


def boundary_us(device: torch.device, read_gbps: float, pdl: bool) -> float:
    """(time - bytes / ceiling) / launches of a graph of read kernels, each of one matrix's size, none of it in L2."""
    launches, each = CHAIN_BYTES // MATRIX_BYTES, MATRIX_BYTES // 4
    buffer = torch.ones(launches * each, device=device)
    programs = each // (BLOCK * FEW)
    out = torch.empty(programs, device=device)

    def chain() -> None:
        for i in range(launches):
            shape: dict[str, Any] = {"BLOCK": BLOCK, "ITERATIONS": FEW, "STAGES": FEW, "PDL": pdl, "num_warps": WARPS}
            read_kernel[(programs,)](buffer[i * each :], out, **shape, **({"launch_pdl": True} if pdl else {}))

    us = median(samples_us(graph_of(chain, 1), device))
    return max(0.0, (us - launches * MATRIX_BYTES / read_gbps / 1e3) / launches)


def graph_of(play: Play, times: int) -> Play:
    """`play`, `times` in a row, as one graph's replay."""
    play()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            play()
    return graph.replay


def _launched(name: str, play: Play, device: torch.device, calls: int = 200) -> LaunchCost:
    play()
    host = []
    for _ in range(9):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            play()
        host.append((time.perf_counter() - start) * 1e6 / calls)
    return LaunchCost(name, host, [back_to_back_us(play, 5 * calls, device) for _ in range(9)])


def copy_gbps(device: torch.device) -> float:
    """Rate of reading and writing in a copy of 2 GB (on a CPU, 64 MB)."""
    source = torch.ones(1 << (29 if device.type == "cuda" else 24), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(samples_us(lambda: target.copy_(source), device)) / 1e3


def tflops(device: torch.device) -> float:
    """Dense bfloat16 arithmetic of the device's own library, on a square large enough for it."""
    size = 8192 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / median(samples_us(lambda: a @ a, device, reps=5)) / 1e6


def run(device: torch.device, output: Output, flags: dict[str, Any]) -> int:
    """Measure and report; the exit code."""
    notes = [
        "host us: the host's time for one launch; each us: one of many in a row, the larger of the host's and the device's"
    ]
    if device.type != "cuda":
        notes.append("no CUDA device: only the call of a torch op can be measured here, not Triton launches, graphs or PDL")
    output.begin(f"bench launches: {describe(device)}", notes)
    costs = measure(device)
    rows = [
        {"launch": c.name, "host us": c.host_us and median(c.host_us), "each us": median(c.each_us), "least us": min(c.each_us)}
        for c in costs
    ]
    found = {cost.name: median(cost.each_us) for cost in costs}
    rule = [f"launched by the host one by one, kernels shorter than {found['torch op']:.2f} us leave the device waiting"]
    result: dict[str, Any] = {"bench": "launches", "environment": environment(device, flags)}
    if device.type == "cuda":
        node, ceiling = found["graph node"], measure_ceiling(device).measured_gbps
        rule.append(f"as nodes of a graph, launches are over a tenth of the time of kernels shorter than {10 * node:.1f} us")
        for pdl in (False, True) if "graph node with PDL" in found else (False,):
            cost = boundary_us(device, ceiling, pdl)
            words = f"boundary of two kernels that stream {MATRIX_BYTES >> 20} MiB each{', with PDL' if pdl else ''}"
            rows.append({"launch": words, "host us": None, "each us": cost, "least us": None})
            result["boundary_pdl_us" if pdl else "boundary_us"] = cost
    result["measured"] = {f"{cost.name} us": cost.each_us for cost in costs}
    output.end(Report(result, {"Launches": rows}, [*rule, "boundary: (time - bytes / read ceiling) / launches of a graph"]))
    return 0
