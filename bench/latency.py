"""Owns `bench latency`: what is loaded, which cells are made of the flags, and what is printed when. Does not own the clock and
the turns (timing), the contenders or the tables (report).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from bench import report
from bench.ceiling import Ceiling, measure_ceiling
from bench.contenders import EngineRun, TransformersRun, needed_len
from bench.hugging_face import around, require_transformers
from bench.profiled import Counts, profile
from bench.session import environment, load, require_folder
from bench.timing import FORMULAS, Cell, Contender, Shape, play
from models import Decoder, Loaded, find_model
from runtime.config import EngineConfig
from runtime.device import describe, resolve


@dataclass(frozen=True)
class LatencyOptions:
    """What `bench latency` was asked for.

    Attributes:
        wishes: one EngineConfig for each combination of ops and graph, with at least as many slots as the largest batch.
        batch, depth: values of the matrix; every pair is a cell of each combination.
        reps, warmup: counted and uncounted passes of each cell.
        random_weights: the model's shapes with random weights.
        against: "transformers" plays the same cells.
        profile: file for the profiler's trace; output: file for the report in `format`.
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
    against: str | None
    profile: Path | None
    format: Literal["md", "json", "jsonl", "csv"]
    output: Path | None
    flags: dict[str, Any]

    def shapes(self) -> list[Shape]:
        return [Shape(batch, self.prompt_len, self.gen_len, depth) for depth in self.depth for batch in self.batch]


def run(options: LatencyOptions) -> int:
    """Load, say the ceiling, measure, report; the last line on stdout is the result's JSON. Exit code 1 if a pass failed.

    Raises:
        QuartetError: a model, a file or a combination of flags that cannot be played.
    """
    apart = partial(print, file=sys.stderr, flush=True)
    if options.against:
        require_transformers()
    require_folder(options.profile, "--profile")
    require_folder(options.output, "--output")
    source = find_model(options.model, options.revision, weights=not options.random_weights)
    source = source.with_random_weights() if options.random_weights else source
    device = torch.device(resolve(options.wishes[0], source.config.dtype)[0].device)
    ceiling = measure_ceiling(device)  # while the memory is still empty
    needed = max(needed_len(shape, options.wishes[0].prefill_chunk) for shape in options.shapes())
    loaded, modes = load(source, options.revision, options.wishes, needed)
    cells = _cells(options, loaded, modes)
    heading = _heading(options, loaded, ceiling, cells)
    print(heading, file=sys.stdout if options.format == "md" else sys.stderr, flush=True)

    counts: list[Counts | str | None] = [None] * len(cells)
    if play(cells, options.reps, options.warmup, apart):
        counts = profile(cells, source.config.num_layers, device, options.profile, apart)
    result = _result(options, loaded, ceiling, cells, counts)
    text = report.text(options.format, result)
    if options.output is not None:
        options.output.write_text(f"{heading}\n{text}\n" if options.format == "md" else f"{text}\n", encoding="utf-8")
    if options.format != "json":
        print(text)
    print(report.json_text(result))
    return 1 if result["failures"] else 0


def _cells(options: LatencyOptions, loaded: Loaded, modes: Sequence[tuple[str, str]]) -> list[Cell]:
    """Every mode of the one engine and, if asked for, transformers, in every shape."""
    model, config, dtype = loaded.engine.model, loaded.source.config, loaded.config.dtype
    contenders: list[Contender] = [EngineRun(loaded.engine, ops, graph) for ops, graph in modes]
    if options.against:
        assert isinstance(model, Decoder)
        contenders.append(TransformersRun(around(model, loaded.source.folder, model.dtype, "sdpa")))
    weights = config.bytes_per_token(dtype)
    cells = []
    for shape in options.shapes():
        kv = config.bytes_per_token(dtype, int(shape.context())) - weights
        cells += [Cell(contender, shape, weights + shape.batch * kv, weights) for contender in contenders]
    return cells


def _heading(options: LatencyOptions, loaded: Loaded, ceiling: Ceiling, cells: Sequence[Cell]) -> str:
    """What is measured and how fast it could be at best, before anything is measured."""
    lines = [*loaded.notes, str(ceiling)]
    for shape, cell in {cell.shape: cell for cell in cells}.items():
        floor_ms = ceiling.floor_ms(cell.step_bytes)
        lines.append(
            f"floor of batch {shape.batch} @ d{shape.depth}: {cell.weight_bytes / 1e9:.3f} GB weights and "
            f"{(cell.step_bytes - cell.weight_bytes) / 1e9:.3f} GB K/V a step, {floor_ms:.3f} ms, "
            f"at most {1e3 * shape.batch / floor_ms:.1f} tok/s"
        )
    lines.append(f"warm-up, full length, not counted: {options.warmup}; then {options.reps} reps of every cell, in turns")
    lines.append(f"{options.prompt_len} prompt tokens of random ids, {options.gen_len} answer tokens, greedy, no end ids")
    if any(options.depth):
        lines.append(
            "depth: positions filled with random K and V on the device in place of prefilling; the prompt is behind them"
        )
    if options.against:
        lines.append("transformers: eager mode (not compiled), SDPA attention, dynamic cache, over the same weights")
    device = describe(torch.device(loaded.config.device))
    return "\n- ".join([f"## bench latency: {loaded.source.label}, {loaded.config.dtype}, {device}\n", *lines]) + "\n"


def _result(
    options: LatencyOptions, loaded: Loaded, ceiling: Ceiling, cells: Sequence[Cell], counts: Sequence[Counts | str | None]
) -> dict[str, Any]:
    config = loaded.source.config
    warnings = (report.above_ceiling(cell, ceiling) for cell in cells)
    return {
        "bench": "latency",
        "environment": environment(loaded, options.model, options.flags),
        "model": loaded.source.label,
        "notes": loaded.notes,
        "parameters": config.num_parameters,
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes_per_position": config.kv_bytes_per_position(loaded.config.dtype),
        "load_seconds": loaded.load_seconds,
        "ceiling": {"read_gbps": ceiling.measured_gbps, "how": ceiling.how, "datasheet_gbps": ceiling.datasheet_gbps},
        "formulas": FORMULAS,
        "percentiles": report.METHOD,
        "cells": [report.cell_json(cell, seen, ceiling) for cell, seen in zip(cells, counts, strict=True)],
        "failures": sum(len(cell.failures) for cell in cells),
        "warnings": [text for text in warnings if text is not None],
    }
