"""Owns `bench latency`: what is loaded, which cells are made of the flags, and what is printed when. Does not own the clock and
the turns (timing), the contenders, the ladder's rungs, or the tables (report).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import ladder, report
from bench.ceiling import Ceiling, measure_ceiling
from bench.contenders import EngineRun, TransformersRun, needed_len
from bench.hugging_face import around
from bench.output import Output, Report, require_folder
from bench.plot import has_matplotlib, require_matplotlib, token_time
from bench.profiled import Counts, profile
from bench.samples import METHOD
from bench.session import environment, gpu_state, load, memory
from bench.start import start_costs
from bench.timing import FORMULAS, Cell, Contender, Shape, play
from models import Decoder, Loaded, find_model
from runtime.config import EngineConfig
from runtime.device import describe, resolve
from runtime.errors import ConfigError


@dataclass(frozen=True)
class LatencyOptions:
    """What `bench latency` was asked for.

    Attributes:
        wishes: one EngineConfig for each combination of ops and graph, with at least as many slots as the largest batch.
        batch, depth: values of the matrix; every pair is a cell of each combination.
        reps, warmup: counted and uncounted passes of each cell.
        random_weights: the model's shapes with random weights.
        against: "transformers" plays the same cells, eagerly and on CUDA compiled too.
        ladder: play the rungs between the unfused eager step and the fused one with PDL.
        start: measure start costs in processes of their own.
        profile: file for the profiler's trace; plot: for the picture of a token's time.
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
    ladder: bool
    start: bool
    profile: Path | None
    plot: Path | None
    output: Output
    flags: dict[str, Any]

    def shapes(self) -> list[Shape]:
        return [Shape(batch, self.prompt_len, self.gen_len, depth) for depth in self.depth for batch in self.batch]


def run(options: LatencyOptions) -> int:
    """Load, say the ceiling, measure, report; the last line on stdout is the result's JSON. Exit code 1 if a pass failed.

    Raises:
        QuartetError: a model, a file or a combination of flags that cannot be played.
    """
    output = options.output
    if options.plot is not None:
        require_matplotlib()
    require_folder(options.profile, "--profile")
    require_folder(options.plot, "--plot")
    source = find_model(options.model, options.revision, weights=not options.random_weights)
    source = source.with_random_weights() if options.random_weights else source
    device = torch.device(resolve(options.wishes[0], source.config.dtype)[0].device)
    for wanted, flag in ((options.ladder, "--ladder"), (options.start, "--start")):
        if wanted and device.type != "cuda":
            raise ConfigError(
                f"{flag} measures kernels, graphs and their compilation, and needs a CUDA device; leave it out here"
            )
    ceiling = measure_ceiling(device)  # while the memory is still empty
    needed = max(needed_len(shape, options.wishes[0].prefill_chunk) for shape in options.shapes())
    start = None
    if options.start:
        wish = replace(options.wishes[0], max_len=options.wishes[0].max_len or needed)
        start = start_costs(options.model, options.revision, options.random_weights, wish)
    loaded, modes = load(source, options.revision, options.wishes, needed)
    cells = _cells(options, loaded, modes)
    output.begin(
        f"bench latency: {source.label}, {loaded.config.dtype}, {describe(device)}", _notes(options, loaded, ceiling, cells)
    )

    counts: list[Counts | str | None] = [None] * len(cells)
    states = {"before": gpu_state() if device.type == "cuda" else None}
    if play(cells, options.reps, options.warmup, output.say):
        states["after"] = gpu_state() if device.type == "cuda" else None
        counts = profile(cells, source.config.num_layers, device, options.profile, output.say)
    result = _result(options, loaded, ceiling, cells, counts) | {"gpu_state": states, "start": start}
    output.end(_report(options, result))
    return 1 if result["failures"] else 0


def _cells(options: LatencyOptions, loaded: Loaded, modes: Sequence[tuple[str, str]]) -> list[Cell]:
    """Every mode of the one engine and, if asked for, the ladder's rungs and transformers, in every shape."""
    engine, config, dtype = loaded.engine, loaded.source.config, loaded.config.dtype
    pdl = loaded.config.pdl == "on"
    runs: dict[tuple[str, str], Contender] = {(ops, graph): EngineRun(engine, ops, graph) for ops, graph in modes}
    if options.ladder:
        rungs = {(run.ops, run.graph): run for run in (ladder.bare(engine), ladder.without_pdl(engine))}
        missing = [(ops, graph) for ops, graph, _ in ladder.RUNGS if (ops, graph) not in {**runs, **rungs}]
        runs |= rungs | {(ops, graph): EngineRun(engine, ops, graph) for ops, graph in missing if ops != "fused" or pdl}
    contenders = list(runs.values())
    if options.against:
        assert isinstance(engine.model, Decoder)
        hf = around(engine.model, loaded.source.folder, engine.model.dtype, "sdpa")
        contenders += [TransformersRun(hf, compiled) for compiled in ([False, True] if hf.device.type == "cuda" else [False])]
    weights = config.bytes_per_token(dtype, weights=loaded.engine.model.weight_format)
    cells = []
    for shape in options.shapes():
        kv = config.bytes_per_token(dtype, int(shape.context())) - config.bytes_per_token(dtype)
        for each in contenders:
            apart = ladder.without_pdl(engine, each.graph) if pdl and each.ops == "fused" else None
            cells.append(Cell(each, shape, weights + shape.batch * kv, weights, apart))
    return cells


def _notes(options: LatencyOptions, loaded: Loaded, ceiling: Ceiling, cells: Sequence[Cell]) -> list[str]:
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
        lines.append("transformers: eager mode, SDPA attention, dynamic cache, over the same weights")
        compiled = "torch.compile reduce-overhead, static cache" if loaded.config.device == "cuda" else "played on CUDA only"
        lines.append(f"transformers compiled: {compiled}")
    if loaded.config.device != "cuda":
        lines.append("on a CPU: token times and bytes; launches, busy times, boundaries and start costs need a CUDA device")
    return lines


def _result(
    options: LatencyOptions, loaded: Loaded, ceiling: Ceiling, cells: Sequence[Cell], counts: Sequence[Counts | str | None]
) -> dict[str, Any]:
    config, device = loaded.source.config, torch.device(loaded.config.device)
    warnings = (report.above_ceiling(cell, ceiling) for cell in cells)
    found = [report.cell_json(cell, seen, ceiling) for cell, seen in zip(cells, counts, strict=True)]
    return {
        "bench": "latency",
        "environment": environment(device, options.flags, options.model, loaded.config.dtype),
        "model": loaded.source.label,
        "notes": loaded.notes,
        "parameters": config.num_parameters,
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes_per_position": config.kv_bytes_per_position(loaded.config.dtype),
        "load_seconds": loaded.load_seconds,
        "memory_bytes": memory(loaded),
        "ceiling": {"read_gbps": ceiling.measured_gbps, "how": ceiling.how, "datasheet_gbps": ceiling.datasheet_gbps},
        "formulas": FORMULAS | report.PARTS | {"boundary_us": report.BOUNDARY, "launch_overhead_us": report.OVERHEAD},
        "percentiles": METHOD,
        "cells": found,
        "split": report.split(found),
        "ratios": report.ratios(found),
        "ladder": report.ladder(found, ladder.RUNGS) if options.ladder else None,
        "failures": sum(len(cell.failures) for cell in cells),
        "warnings": [text for text in warnings if text is not None],
    }


def _report(options: LatencyOptions, result: dict[str, Any]) -> Report:
    """The tables of a result, and its picture where one was asked for or a page has room for it."""
    cells, title = result["cells"], f"{result['model']}: where a token's time goes"
    tables: dict[str, Sequence[Any]] = {
        "Tokens": report.rows(result["model"], cells),
        "Launches, from the profiler": report.count_rows(cells),
        "Where a token's time goes, ms": result["split"],
        "Ratios": result["ratios"],
        "Ladder": result["ladder"] or [],
        "Memory": [{"kind": kind, "MB": size / 1e6} for kind, size in result["memory_bytes"].items() if size is not None],
        "Start": [{"start": name, **costs} for name, costs in (result["start"] or {}).items()],
        "GPU": [{"when": when, **state} for when, state in result["gpu_state"].items() if state],
    }
    pictures = {}
    if options.plot is not None or (options.output.html is not None and has_matplotlib()):
        bars = result["split"] or [{"name": report.label(c), **_unsplit(c)} for c in cells if c["p50_itl_ms"]]
        pictures[title] = token_time(title, bars)
        if options.plot is not None:
            options.plot.write_bytes(pictures[title])
    records = [{"model": result["model"], **cell} for cell in cells]
    return Report(result, tables, report.footnotes(result), records, pictures)


def _unsplit(cell: dict[str, Any]) -> dict[str, float]:
    """Without a profile (a CPU run) only the floor is told apart from the rest, which counts as kernels."""
    floor = min(cell["floor_ms"], cell["p50_itl_ms"])
    return {"floor": floor, "kernels": cell["p50_itl_ms"] - floor, "gaps": 0.0, "host": 0.0}
