"""Owns `bench kernels`: each kernel of a fused step, its bytes, floor, time, registers and spills, beside the unfused launches
it replaces; and what the tuner found. Does not own the byte arithmetic (arithmetic) or the search (tune).

Times are of kernels inside whole steps with PDL off, from the profiler's raw events: each layer has weights of its own, so L2
holds none of them, and no kernel waits inside another's time.
"""

from dataclasses import asdict
from typing import Any

import torch

from bench.arithmetic import H200, Launch, in_order, step_launches, step_name
from bench.ceiling import Ceiling, measure_ceiling
from bench.output import Output, Report
from bench.session import environment
from bench.steps import Play, Resources, StepsOptions, WholeSteps, launched, median
from bench.tune import start_from, tune
from models import Loaded
from models.config import DTYPE_BYTES
from runtime.errors import ConfigError
from runtime.ops import OPS_SETS, load_ops
from runtime.ops.tuned import save_tuned

HOW = "times: medians of raw profiler events inside whole steps played as a graph, PDL off; every layer has its own weights"
ROW_TIMES = "us of one launch; 'replaces' and 'their us' are the unfused launches whose work it does"


RECORDED = Ceiling(H200.read_gbps, f"on record, not of this machine: {H200.source}", None)


def launch_times(steps: WholeSteps, launches: list[Launch], play: Play) -> dict[str, list[float]] | str:
    """Microseconds of each launch of a step by its name, a sample for each layer and step; or why there are none.

    Args:
        play: a step whose kernels do not overlap (PDL off).
    """
    played = steps.launches_us(play)
    ordered = in_order(launches)
    if len(played[0]) != len(ordered):
        return f"a step has {len(played[0])} kernels where {len(ordered)} are reckoned with, so times have no names"
    times: dict[str, list[float]] = {}
    for step in played:
        for launch, (_, us) in zip(ordered, step, strict=True):
            times.setdefault(launch.name, []).append(us)
    return times


def run(options: StepsOptions, seconds: float | None) -> int:
    """Measure every batch and report, `seconds` of tuning for each before; the exit code."""
    source, output = options.source(), options.output
    settled = options.settled(source)
    weights = settled.weights
    if seconds is not None and settled.device != "cuda":
        raise ConfigError("--tune times fused kernels and needs a CUDA device; leave it out here")
    if seconds is not None and weights != "bf16":
        raise ConfigError(f"--tune searches the tiles of dense weights and these are {weights}; give --weights bf16")
    device = torch.device(settled.device)
    cuda = device.type == "cuda"
    ceiling = measure_ceiling(device) if cuda else RECORDED
    how = (HOW, ROW_TIMES) if cuda else ("no CUDA device: bytes, and an H200's floors; no kernel can be timed here",)
    title = f"bench kernels: {source.label}, {settled.dtype}, weights {weights}"
    output.begin(title, [str(ceiling), f"context {options.context}", *how])
    tables: dict[str, Any] = {}
    result: dict[str, Any] = {"bench": "kernels", "measured": {}, "ceiling": asdict(ceiling)}
    result["environment"] = environment(device, options.flags, source.label, settled.dtype, weights)
    footnotes: list[str] = []
    loaded = options.load() if cuda else None
    for batch in options.batch:
        sets = {ops: step_launches(source.config, settled.dtype, batch, options.context, ops, weights) for ops in OPS_SETS}
        times: dict[str, dict[str, list[float]]] = {ops: {} for ops in sets}
        resources: list[Resources] = []
        if loaded is not None:
            steps = WholeSteps(loaded, batch, options.context)
            if seconds is not None:
                footnotes += _tune(loaded, steps, seconds, output, result)
            for ops, launches in sets.items():
                name = step_name(batch, ops, weights)
                seen = launch_times(steps, launches, steps.graph(load_ops(ops, pdl=False)))
                if isinstance(seen, str):
                    footnotes.append(f"{name}: {seen}")
                else:
                    times[ops] = seen
                    result["measured"] |= {f"{name} {launch} us": us for launch, us in seen.items()}
            resources = launched(steps.eager(load_ops("fused", pdl=False)))
        tables[f"Kernels of a fused step, batch {batch}"] = table(sets, times, resources, ceiling)
    output.end(Report(result, tables, footnotes))
    return 0


def table(
    sets: dict[str, list[Launch]], times: dict[str, dict[str, list[float]]], resources: list[Resources], ceiling: Ceiling
) -> list[dict[str, Any]]:
    """A row for each launch of a fused step; what was not measured stays empty."""
    rows = []
    ordered = in_order(sets["fused"])
    for launch in sets["fused"]:
        replaced = [each for each in sets["unfused"] if each.into == launch.name]
        us = median(times["fused"][launch.name]) if launch.name in times["fused"] else None
        theirs = [median(times["unfused"][each.name]) for each in replaced if each.name in times["unfused"]]
        where = ordered.index(launch)
        taken = resources[where] if len(resources) == len(ordered) else None
        rows.append(
            {
                "kernel": launch.name,
                "a step": launch.times,
                "MB": launch.hbm_bytes / 1e6,
                "floor us": launch.hbm_bytes / ceiling.measured_gbps / 1e3,
                "us": us,
                "GB/s": launch.hbm_bytes / us / 1e3 if us else None,
                "of ceiling": f"{launch.hbm_bytes / us / 10 / ceiling.measured_gbps:.1f}%" if us else None,
                "registers": taken.registers if taken else None,
                "spills": taken.spills if taken else None,
                "replaces": " + ".join(each.name for each in replaced),
                "their us": sum(theirs) if len(theirs) == len(replaced) else None,
            }
        )
    return rows


def _tune(loaded: Loaded, steps: WholeSteps, seconds: float, output: Output, result: dict[str, Any]) -> list[str]:
    """Tune for this batch's kind of kernels and file what was found."""
    config, name = loaded.source.config, torch.cuda.get_device_name(steps.device)
    pdl = loaded.config.pdl == "on"
    found = start_from(config, steps, DTYPE_BYTES[loaded.config.dtype], loaded.config.weights, pdl)
    tune(found, steps, pdl, seconds, output.say)
    result.setdefault("tuned", {})[str(steps.batch)] = {"start_ms": found.start_ms, "ms": found.ms, "log": found.log}
    path = save_tuned(name, found.tiles) if found.ms < found.start_ms else None
    where = f"written to {path}" if path else "nothing better was found, nothing written"
    return [f"tuned for batch {steps.batch}: {found.start_ms:.4f} ms before, {found.ms:.4f} ms after; {where}"]
