"""Owns `bench roofline`: the step's byte arithmetic written out launch by launch, the time it predicts from ceilings and shapes
alone, what each fusion is predicted to gain, and then, on CUDA, the measured times beside it.

Does not own the arithmetic (arithmetic), the ceilings' measurement (launches) or the clocks (kernels, steps).
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from bench.arithmetic import H200, Ceilings, Launch, in_order, step_bytes, step_launches, step_ms, step_name
from bench.chains import ways_table
from bench.kernels import launch_times
from bench.launches import WAYS, measure_ceilings
from bench.output import Output, Report
from bench.profiled import counted, watched
from bench.session import environment
from bench.steps import StepsOptions, WholeSteps, median
from runtime.ops import OPS_SETS, load_ops

COUNTED = 11
"""Launches counted by ncu: the embedding and two layers."""
EXPLAINED = (
    "hbm MB: weights, K and V that a launch must read; l2 MB: activations read and written, which a few rows keep in L2",
    "predicted us: what a launch that reads as many bytes the same way takes in a chain, or operations / arithmetic ceiling if "
    "that is more; and where blocks leave partial sums for the last of them, what such a meeting takes",
    "bound: memory or arithmetic, by the side of the roof, or launch, where both take less than launching",
)
SAVES = "at these batches fusion saves boundaries, not HBM bytes: every weight is read once either way"
SAVES_DENSE = "unfused, a weight of 8 or 4 bits is made dense before its products, so fusion saves HBM bytes here too"

Plan = dict[tuple[int, str], list[Launch]]
"""A step's launches by batch and ops set."""
Times = dict[tuple[int, str], dict[str, list[float]]]
"""Microseconds of each launch by its name, by batch and ops set."""


def run(options: StepsOptions, gpu: str | None) -> int:
    """Predict, say so, then measure what this device can; the exit code.

    Args:
        gpu: "h200" takes the figures on record, "measured" this device's, measured now; None: those of a CUDA device only.
    """
    source, output = options.source(), options.output
    settled = options.settled(source)
    config, dtype, weights, device = source.config, settled.dtype, settled.weights, torch.device(settled.device)
    gpu = gpu or ("measured" if device.type == "cuda" else "h200")
    ceilings = measure_ceilings(device) if gpu == "measured" else H200
    plan: Plan = {
        (batch, ops): step_launches(config, dtype, batch, options.context, ops, weights)
        for batch in options.batch
        for ops in reversed(OPS_SETS)
    }
    predicted = predictions(plan, ceilings, weights)
    notes = [
        f"context {options.context}; read {ceilings.read_gbps:,.0f} GB/s, arithmetic {ceilings.tflops:,.0f} TFLOP/s, and "
        f"launches by the bytes they read: {ceilings.source}",
        *(f"predicted before the run: {name} {ms:.3f} ms a step" for name, ms in predicted.items()),
    ]
    measures = gpu == "measured" and device.type == "cuda"
    if not measures:
        notes.append("arithmetic only: " + ("no CUDA device here" if device.type != "cuda" else "--gpu measured measures"))
    output.begin(f"bench roofline: {source.label}, {dtype}, weights {weights}", notes)
    times: Times = {}
    measured: dict[str, list[float]] = {}
    footnotes, counts = [*EXPLAINED, SAVES if weights == "bf16" else SAVES_DENSE], None
    if measures:
        for (batch, ops), launches in plan.items():
            output.show(f"Predicted, {ops}, batch {batch}", rows(launches, ceilings, {}))
        footnotes += _measure(options, plan, weights, times, measured)
        # A process of its own, with weights of its own: ours are gone by now.
        counts, words = counters(options, plan[options.batch[0], "fused"])
        footnotes += words
    tables: dict[str, Sequence[Any]] = {WAYS: ways_table(ceilings)}
    tables |= {
        f"One step, {ops}, batch {batch}": rows(launches, ceilings, times.get((batch, ops), {}))
        for (batch, ops), launches in plan.items()
    }
    tables |= {f"What each fusion gains, batch {batch}": gains(plan, batch, ceilings, times) for batch in options.batch}
    tables["Whole steps"] = whole_steps(plan, ceilings, predicted, measured)
    result = {
        "bench": "roofline",
        "environment": environment(device, options.flags, source.label, dtype, weights),
        "ceilings": asdict(ceilings),
        "predicted": predicted,
        "measured": measured,
        "launches": {f"b{batch} {ops}": [asdict(each) for each in launches] for (batch, ops), launches in plan.items()},
        "counters": counts,
    }
    output.end(Report(result, tables, footnotes))
    return 0


def predictions(plan: Plan, ceilings: Ceilings, weights: str) -> dict[str, float]:
    """Milliseconds of each kind of step as one graph, from ceilings and shapes alone."""
    return {
        step_name(batch, ops, weights, pdl): step_ms(launches, ceilings, pdl)
        for (batch, ops), launches in plan.items()
        for pdl in ((False, True) if ops == "fused" else (False,))
    }


def whole_steps(
    plan: Plan, ceilings: Ceilings, predicted: dict[str, float], measured: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """A row for each kind of step: bytes over the read ceiling, what boundaries add, and all of it, predicted and measured."""
    table = []
    for name, ms in predicted.items():
        batch = next(batch for batch, _ in plan if name.startswith(f"b{batch} "))
        floor, found = step_bytes(plan[batch, "fused"]) / ceilings.read_gbps / 1e6, _middle(measured.get(name))
        row = {"step": name, "bytes ms": floor, "boundaries ms": ms - floor, "predicted ms": ms}
        row |= {"measured boundaries ms": None if found is None else found - floor, "measured ms": found}
        table.append({**row, "off": _off(ms, measured.get(name))})
    return table


def rows(launches: Sequence[Launch], ceilings: Ceilings, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each launch; measured where `times` has it."""
    return [
        {
            "launch": each.name,
            "a step": each.times,
            "hbm MB": each.hbm_bytes / 1e6,
            "l2 MB": each.l2_bytes / 1e6,
            "Mops": each.operations / 1e6,
            "ops/byte": each.intensity,
            "bound": ceilings.side(each),
            "way": each.way + (", met" if each.meets else ""),
            "predicted us": (us := ceilings.predicted_us(each, pdl=False)),
            "measured us": _middle(times.get(each.name)),
            "off": _off(us, times.get(each.name)),
        }
        for each in launches
    ]


def gains(plan: Plan, batch: int, ceilings: Ceilings, times: Times) -> list[dict[str, Any]]:
    """For each fused launch: the unfused ones in its place, the boundaries, bytes and microseconds a step that it saves."""
    table = []
    before, after = (times.get((batch, ops), {}) for ops in ("unfused", "fused"))
    for fused in plan[batch, "fused"]:
        apart = [each for each in plan[batch, "unfused"] if each.into == fused.name]
        predicted = sum(ceilings.predicted_us(each, False) for each in apart) - ceilings.predicted_us(fused, False)
        known = fused.name in after and all(each.name in before for each in apart)
        saved = sum(median(before[each.name]) for each in apart) - median(after[fused.name]) if known else None
        table.append(
            {
                "fused launch": fused.name,
                "in place of": " + ".join(each.name for each in apart),
                "launches saved a step": sum(each.times for each in apart) - fused.times,
                "hbm MB saved": (sum(each.hbm_bytes for each in apart) - fused.hbm_bytes) * fused.times / 1e6,
                "l2 MB saved": (sum(each.l2_bytes for each in apart) - fused.l2_bytes) * fused.times / 1e6,
                "predicted gain us": fused.times * predicted,
                "measured gain us": None if saved is None else fused.times * saved,
            }
        )
    return table


def counters(options: StepsOptions, launches: list[Launch]) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """DRAM bytes of the first launches of a fused step beside the predicted ones; the words say how they agree, or why not."""
    asked = replace(options, output=Output(), flags={})
    found = counted(f"from bench.roofline import *; play_watched({asked!r})", COUNTED)
    if isinstance(found, str):
        return None, [f"counters: {found}"]
    words, kept = [], []
    for launch, each in zip(in_order(launches), found, strict=False):
        kept.append({"launch": launch.name, "predicted_bytes": launch.hbm_bytes, **asdict(each)})
        share = f"{each.dram_read / launch.hbm_bytes:.3f} of the predicted, " if launch.hbm_bytes else ""
        read = f"{launch.name} read {each.dram_read / 1e6:,.2f} MB of DRAM"
        words.append(f"counters: {read}, {share}{each.l2_sectors:,.0f} L2 sectors")
    return kept, words


def play_watched(options: StepsOptions) -> None:
    """One eager fused step with PDL off, under the counters; for the process that ncu starts."""
    batch = options.batch[0]
    watched(WholeSteps(options.load(), batch, options.context).eager(load_ops("fused", pdl=False)))


def _measure(options: StepsOptions, plan: Plan, weights: str, times: Times, measured: dict[str, list[float]]) -> list[str]:
    """Fill in the times: whole steps as graphs, and launches; words for what could not be had."""
    loaded, words = options.load(), []
    for batch in options.batch:
        steps = WholeSteps(loaded, batch, options.context)
        for ops in OPS_SETS:
            play = steps.graph(load_ops(ops, pdl=False))
            measured[step_name(batch, ops, weights)] = steps.ms(play)
            seen = launch_times(steps, plan[batch, ops], play)
            if isinstance(seen, str):
                words.append(f"batch {batch}, {ops}: {seen}")
            else:
                times[batch, ops] = seen
        if loaded.config.pdl == "on":
            measured[step_name(batch, "fused", weights, pdl=True)] = steps.ms(steps.graph(load_ops("fused", pdl=True)))
    return words


def _middle(samples: list[float] | None) -> float | None:
    return median(samples) if samples else None


def _off(predicted: float, samples: list[float] | None) -> str | None:
    """By how much the prediction misses the measured median."""
    return f"{100 * (predicted / median(samples) - 1):+.1f}%" if samples else None
