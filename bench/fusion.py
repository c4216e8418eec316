"""Owns `bench fusion`: every experiment predicted, then measured where there is a GPU, and one line for each that says what was
predicted, what was measured and why. Does not own the experiments or their bytes (experiments).
"""

from collections.abc import Sequence
from typing import Any

import torch

from bench.arithmetic import H200, Ceilings
from bench.experiments import Experiment, Variant, by_name
from bench.launches import measure_ceilings
from bench.output import Output, Report
from bench.profiled import counted, watched
from bench.session import environment
from bench.steps import launched, median, require_device, samples_us


def run(device: torch.device, only: Sequence[str] | None, output: Output, flags: dict[str, Any]) -> int:
    """Predict, measure what this device can, report; the exit code."""
    cuda = device.type == "cuda"
    rates = measure_ceilings(device) if cuda else H200
    notes = [
        f"read and write {rates.copy_gbps:,.0f} GB/s, arithmetic {rates.tflops:,.0f} TFLOP/s, host launches "
        f"{rates.torch_us:.1f} us (torch), {rates.triton_us:.1f} us (Triton): {rates.source}",
        "predicted: each kernel's bytes or arithmetic over these, and at least the host's launches; MB: by arithmetic",
    ]
    if not cuda:
        notes.append("no CUDA device: the arithmetic only, nothing is measured here")
    output.begin("bench fusion", notes)
    tables: dict[str, Any] = {}
    words, measured = [], dict[str, list[float]]()
    for name, group in by_name().items():
        for experiment in group if not only or name in only else []:
            output.say(experiment.title)
            found = [_row(variant, rates, device) for variant in experiment.variants]
            tables[experiment.title] = [row for row, _ in found]
            measured |= {f"{experiment.title}: {row['variant']} us": us for row, us in found if us}
            words.append(f"{experiment.title}: {_word(experiment, rates, {row['variant']: row['us'] for row, _ in found})}")
        if cuda and (not only or name in only):
            words += _counters(name, group[0])
    result = {"bench": "fusion", "environment": environment(device, flags), "rates": vars(rates), "measured": measured}
    result["words"] = words
    output.end(Report(result, tables, words))
    return 0


def play_watched(name: str) -> None:
    """The first experiment's Triton kernel under the counters; for the process that ncu starts."""
    variant = by_name()[name][0].variants[-1]
    watched(variant.make(torch.device("cuda")))


def _row(variant: Variant, rates: Ceilings, device: torch.device) -> tuple[dict[str, Any], list[float] | None]:
    """A table's row and its samples. What cannot be played is told in the row: other variants go on."""
    moved = sum(each for each, _ in variant.kernels)
    row: dict[str, Any] = {"variant": variant.name, "kernels": len(variant.kernels), "MB": moved / 1e6}
    row |= {"predicted us": variant.predicted_us(rates), **dict.fromkeys(("us", "GB/s", "registers", "spills", "note"))}
    if device.type != "cuda":
        return row, None
    samples = None
    try:
        play = variant.make(device)
        if variant.name.startswith("Triton") and variant.host:
            registers, spills = zip(*launched(play), strict=True)
            row |= {"registers": max(registers), "spills": max(spills)}
        samples = samples_us(play, device)
        row |= {"us": median(samples), "GB/s": moved / median(samples) / 1e3}
        del play
    except Exception as error:  # compilers raise types of their own
        require_device(device, error)
        row["note"] = f"failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    torch.cuda.empty_cache()
    return row, samples


def _word(experiment: Experiment, rates: Ceilings, us: dict[str, float | None]) -> str:
    """Predicted, measured, why: in one line."""
    by_name = {variant.name: variant for variant in experiment.variants}
    slow, fast = experiment.gain
    predicted = by_name[slow].predicted_us(rates) / by_name[fast].predicted_us(rates)
    a, b = us[slow], us[fast]
    measured = f"measured {a / b:.2f} times" if a and b else "not measured"
    return f"{fast!r} faster than {slow!r}: predicted {predicted:.2f} times, {measured}: {experiment.why}"


def _counters(name: str, experiment: Experiment) -> list[str]:
    variant = experiment.variants[-1]
    found = counted(f"from bench.fusion import play_watched; play_watched({name!r})", len(variant.kernels), 60)
    if isinstance(found, str):
        return [f"counters, {name}: {found}"]
    moved = sum(each.dram_read + each.dram_written for each in found)
    predicted = sum(each for each, _ in variant.kernels)
    return [
        f"counters, {experiment.title}, {variant.name}: {moved / 1e6:,.1f} MB of DRAM, {moved / predicted:.3f} of the predicted"
    ]
