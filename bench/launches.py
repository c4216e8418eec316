"""Owns `bench launches`: what a launch costs the host and the device, as a torch op, a Triton launch, and a graph's node with
and without PDL; and all ceilings that a prediction is made of. Does not own the read ceiling (ceiling) or the chains (chains).
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.arithmetic import H200, SIZES, Ceilings
from bench.ceiling import measure_ceiling
from bench.chains import measure_meeting, measure_ways, node_samples_us, tried, ways_table
from bench.output import Output, Report
from bench.session import environment
from bench.steps import Play, back_to_back_us, graph_of, median, samples_us
from runtime.device import describe
from runtime.ops._triton import tl, triton

WAYS = "A launch of a graph by the bytes it reads"
TRIED = "Launches x boundary cost: sizes that were not measured, from those that were"


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

    costs = [_launched("torch op", lambda: x.add_(1.0), device)]
    if device.type == "cuda":
        costs += [_launched("Triton launch", tiny, device), LaunchCost("graph node", None, node_samples_us(tiny, device))]
        if torch.cuda.get_device_capability(device) >= (9, 0):
            costs.append(LaunchCost("graph node with PDL", None, node_samples_us(tiny_pdl, device)))
        costs.append(_launched("graph of one node", graph_of(tiny, 1), device))
    return costs


def measure_ceilings(device: torch.device, costs: list[LaunchCost] | None = None) -> Ceilings:
    """The ceilings of this device that a prediction needs, measured now, `costs` taken if they are known; some seconds."""
    gbps, us = measure_ceiling(device).measured_gbps, {each.name: median(each.each_us) for each in costs or measure(device)}
    host, l2 = us["torch op"], 0
    straight = (host, *(size / gbps / 1e3 for size in SIZES[1:]))  # a CPU reads in every way at the ceiling
    ways = {way: straight[: len(sizes)] for way, sizes in H200.ways.items()}
    meeting, source = 0.0, "on the CPU, where a launch is a call of a torch op"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        l2, source = found.L2_cache_size // found.multi_processor_count, ""
        ways = measure_ways(device, us["graph node"], us.get("graph node with PDL"))
        meeting = measure_meeting(device)
    ceilings = Ceilings(
        read_gbps=gbps,
        copy_gbps=copy_gbps(device),
        tflops=tflops(device),
        torch_us=host,
        triton_us=us.get("Triton launch", host),
        ways=ways,
        meeting_us=meeting,
        sm_l2_bytes=l2,
        source=f"measured now {source}".strip(),
    )
    torch.cuda.empty_cache()  # gigabytes, which a model may need
    return ceilings


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
    tables: dict[str, Any] = {"Launches": rows}
    if device.type == "cuda":
        node = found["graph node"]
        rule.append(f"as nodes of a graph, launches are over a tenth of the time of kernels shorter than {10 * node:.1f} us")
        ceilings = measure_ceilings(device, costs)
        result["ceilings"] = asdict(ceilings)
        tables |= {WAYS: ways_table(ceilings), TRIED: tried(device, ceilings)}
    result["measured"] = {f"{cost.name} us": cost.each_us for cost in costs}
    output.end(Report(result, tables, rule))
    return 0
