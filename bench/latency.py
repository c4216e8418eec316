"""Owns `bench latency`: what is loaded, which cells are made of the flags, and what is printed when. Does not own the playing
(cells), the clock (timing) or the tables (report).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench import percentiles, report
from bench.ceiling import Ceiling, measure_ceiling
from bench.cells import Cell, above_ceiling, play, profile
from bench.engine_run import EngineRun, needed_len
from bench.environment import clocks_mhz, environment, peak_process_bytes
from bench.hf_model import around, require_transformers
from bench.hf_run import TransformersRun
from bench.loading import graph_name, load
from bench.timing import FORMULAS, Contender, Shape
from models import Decoder, Loaded, ModelConfig, find_model
from runtime.config import EngineConfig
from runtime.device import describe, resolve
from runtime.errors import ConfigError

Format = Literal["md", "json", "jsonl", "csv"]


@dataclass(frozen=True)
class LatencyOptions:
    """What `bench latency` was asked for.

    Attributes:
        wishes: one EngineConfig for each combination of ops and graph, with at least as many slots as the largest batch.
        batch, depth: values of the matrix; every pair is a cell of each combination.
        reps, warmup: counted and uncounted passes of each cell.
        random_weights: the model's shapes with random weights.
        against: whether transformers plays the same cells.
        trace: file for the profiler's trace, or None.
        output: file for the report in `format`, or None.
        flags: the command line, for the result.
    """

    model: str
    revision: str | None
    wishes: tuple[EngineConfig, ...]
    batch: tuple[int, ...]
    prompt_len: int
    gen_len: int
    depth: tuple[int, ...]
    reps: int
    warmup: int
    random_weights: bool
    against: bool
    trace: Path | None
    format: Format
    output: Path | None
    flags: dict[str, Any]

    def shapes(self) -> list[Shape]:
        return [Shape(batch, self.prompt_len, self.gen_len, depth) for depth in self.depth for batch in self.batch]


def run(options: LatencyOptions) -> int:
    """Load, say the ceiling, measure, report; the last line on stdout is the result's JSON. Exit code 1 if a pass failed.

    Raises:
        QuartetError: a model, a file or a combination of flags that cannot be played.
    """
    say = _say if options.format == "md" else _say_apart
    if options.against:
        require_transformers()
    for path in (options.trace, options.output):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: the folder does not exist; make it first")
    source = find_model(options.model, options.revision, weights=not options.random_weights)
    source = source.with_random_weights() if options.random_weights else source
    device = torch.device(resolve(options.wishes[0], source.config.dtype)[0].device)
    ceiling = measure_ceiling(device)  # while the memory is still empty
    needed = max(needed_len(shape, options.wishes[0].prefill_chunk) for shape in options.shapes())
    loaded, combinations = load(source, options.revision, options.wishes, needed, "prompt, depth and answer")
    cells = _cells(options, loaded, combinations)
    heading = "\n".join(_heading(options, loaded, ceiling, cells))
    say(heading)

    if play(cells, options.reps, options.warmup, device, _say_apart):
        profile(cells, loaded.source.config.num_layers, device, options.trace, _say_apart)
    warnings = [text for cell in cells if (text := above_ceiling(cell, ceiling.floor_ms(cell.step_bytes))) is not None]
    results = [report.cell_json(cell, ceiling) for cell in cells]
    whole = _result(options, loaded, ceiling, results, warnings, device)
    text = _report(options.format, whole)
    if options.format != "json":
        print(text)
    if options.format != "md":
        for warning in warnings:
            _say_apart(f"warning: {warning}")
    if options.output is not None:
        kept = f"{heading}\n{text}" if options.format == "md" else text
        options.output.write_text(kept + "\n", encoding="utf-8")
    print(report.json_text(whole))
    return 1 if whole["failures"] else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _say_apart(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _cells(options: LatencyOptions, loaded: Loaded, combinations: Sequence[EngineConfig]) -> list[Cell]:
    """Every mode of the one engine and, if asked for, transformers, in every shape."""
    model = loaded.engine.model
    contenders: list[Contender] = [EngineRun(loaded.engine, config.ops, graph_name(config)) for config in combinations]
    others = [0] * len(contenders)
    if options.against:
        assert isinstance(model, Decoder)
        hf = around(model, loaded.source.path, model.dtype, "sdpa")
        contenders.append(TransformersRun(hf, model.device))
        others.append(loaded.engine.cache.nbytes)
    config, dtype = loaded.source.config, loaded.config.dtype
    return [
        Cell(contender, shape, _step_bytes(config, dtype, shape), config.bytes_per_token(dtype), resident)
        for shape in options.shapes()
        for contender, resident in zip(contenders, others, strict=True)
    ]


def _step_bytes(config: ModelConfig, dtype: str, shape: Shape) -> int:
    """What a decode step must read: the weights once for all streams, and each stream's K and V."""
    weights = config.bytes_per_token(dtype)
    return weights + shape.batch * (config.bytes_per_token(dtype, int(shape.context())) - weights)


def _heading(options: LatencyOptions, loaded: Loaded, ceiling: Ceiling, cells: Sequence[Cell]) -> list[str]:
    """What is measured and how fast it could be at best, before anything is measured."""
    device = torch.device(loaded.config.device)
    lines = [f"## bench latency: {loaded.source.label}, {loaded.config.dtype}, {describe(device)}", ""]
    lines += [f"- {note}" for note in loaded.notes]
    lines.append(f"- {ceiling}")
    for shape in options.shapes():
        cell = next(cell for cell in cells if cell.shape == shape)
        floor_ms = ceiling.floor_ms(cell.step_bytes)
        lines.append(
            f"- floor of batch {shape.batch} @ d{shape.depth}: {cell.weight_bytes / 1e9:.3f} GB weights and "
            f"{(cell.step_bytes - cell.weight_bytes) / 1e9:.3f} GB K/V a step, {floor_ms:.3f} ms, "
            f"at most {1e3 * shape.batch / floor_ms:.1f} tok/s"
        )
    lines.append(f"- warm-up, full length, not counted: {options.warmup}; then {options.reps} reps of every cell, in turns")
    lines.append(f"- {options.prompt_len} prompt tokens of random ids, {options.gen_len} answer tokens, greedy, no end ids")
    if any(options.depth):
        lines.append(
            "- depth: positions filled with random K and V on the device in place of prefilling; the prompt is behind them"
        )
    if options.against:
        lines.append("- transformers: eager mode (not compiled), SDPA attention, dynamic cache, over the same weights")
    return [*lines, ""]


def _report(format: Format, whole: dict[str, Any]) -> str:
    """The result in the format asked for: what goes to FILE, and to stdout in front of the JSON line."""
    results, model = whole["cells"], whole["model"]
    if format == "md":
        tables = [report.markdown(table) for table in (report.rows(model, results), report.count_rows(results)) if table]
        return "\n\n".join([*tables, "\n".join(_footnotes(whole))])
    if format == "csv":
        return report.csv_text(results)
    if format == "jsonl":
        return "\n".join(report.json_text({"model": model, **result}) for result in results)
    return report.json_text(whole)


def _footnotes(whole: dict[str, Any]) -> list[str]:
    """Formulas, the percentiles' method, memory, failures and warnings."""
    results = whole["cells"]
    lines = [f"- {name}: {formula}" for name, formula in FORMULAS.items()]
    samples = ", ".join(str(n) for n in dict.fromkeys(result["n_itl_ms"] for result in results))
    lines.append(f"- percentiles: {percentiles.METHOD}; n = {samples} gaps a cell; ± is the deviation over the reps")
    if any(result["p99_itl_ms_has_few_samples"] for result in results):
        lines.append(f"- \\*: a p99 of fewer than {percentiles.P99_NEEDS} samples is nearly their maximum")
    lines.append("- of floor: step_bytes / mean tpot_ms / read ceiling; of datasheet: the same over the datasheet's rate")
    failed = [
        f"{r['ops']}/{r['graph']} batch {r['batch']} depth {r['depth']}, {text}" for r in results for text in r["failures"]
    ]
    for ops in dict.fromkeys((r["ops"], r["graph"]) for r in results):
        peaks = [r["peak_bytes"] or 0 for r in results if (r["ops"], r["graph"]) == ops]
        if max(peaks):
            lines.append(f"- peak device memory of {ops[0]}/{ops[1]}: {max(peaks) / 1e9:.2f} GB, weights and caches included")
    if whole["peak_process_bytes"] is not None:
        lines.append(f"- peak host memory of the process: {whole['peak_process_bytes'] / 1e9:.2f} GB")
    lines.append(f"- failed passes: {len(failed)}")
    lines += [f"  - {text}" for text in failed]
    lines += [f"- not profiled: {text}" for text in dict.fromkeys(r["profile_note"] for r in results) if text is not None]
    return lines + [f"- warning: {warning}" for warning in whole["warnings"]]


def _result(
    options: LatencyOptions,
    loaded: Loaded,
    ceiling: Ceiling,
    results: Sequence[dict[str, Any]],
    warnings: Sequence[str],
    device: torch.device,
) -> dict[str, Any]:
    config = loaded.source.config
    named = {"model": options.model, "dtype": loaded.config.dtype, "flags": options.flags}
    return {
        "bench": "latency",
        "environment": {**environment(device), "clocks_mhz": clocks_mhz(device), **named},
        "model": loaded.source.label,
        "notes": loaded.notes,
        "parameters": config.num_parameters,
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes_per_position": config.kv_bytes_per_position(loaded.config.dtype),
        "load_seconds": loaded.load_seconds,
        "peak_process_bytes": peak_process_bytes(),
        "ceiling": {
            "read_gbps": ceiling.measured_gbps,
            "how": ceiling.how,
            "datasheet_gbps": ceiling.datasheet_gbps,
        },
        "formulas": FORMULAS,
        "percentiles": percentiles.METHOD,
        "cells": list(results),
        "failures": sum(len(result["failures"]) for result in results),
        "warnings": list(warnings),
    }
