"""Owns `bench latency`: what is loaded, which cells are made of the flags, and what is printed when. Does not own the clock and
the turns (timing), the contenders, the ladder's rungs, or the tables (report).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.ceiling import Ceiling, measure_ceiling
from bench.contenders import RUNGS, EngineRun, TransformersRun, bare, needed_len, without_pdl
from bench.hugging_face import around
from bench.output import Output, Report, has_matplotlib, require_folder, require_matplotlib, token_time
from bench.profiled import Seen, profile
from bench.samples import METHOD
from bench.session import environment, gpu_state, load, memory, start_costs
from bench.timing import FORMULAS, Cell, Contender, Shape, play
from models import Decoder, Loaded, ModelSource, find_model
from models.quantized import settle_weights
from runtime.config import EngineConfig
from runtime.device import describe, free_bytes, resolve
from runtime.engine import Engine
from runtime.errors import ConfigError, OutOfMemoryError
from runtime.ops import OPS_SETS


@dataclass(frozen=True)
class LatencyOptions:
    """The flags of `bench latency`, and `wishes`, an EngineConfig for each combination of weights, ops and graph, with slots
    for the largest batch. Every pair of batch and depth is a cell of each combination; `counts`: the profiler plays too."""

    model: str
    revision: str | None
    wishes: tuple[EngineConfig, ...]
    batch: tuple[int, ...]
    prompt_len: int
    gen_len: int
    depth: tuple[int, ...]
    alone: tuple[int, ...]
    reps: int
    warmup: int
    random_weights: bool
    against: str | None
    ladder: bool
    start: bool
    counts: bool
    profile: Path | None
    plot: Path | None
    output: Output
    flags: dict[str, Any]

    def matrix(self) -> list[Shape]:
        return [Shape(batch, self.prompt_len, self.gen_len, depth) for depth in self.depth for batch in self.batch]

    def alone_shapes(self) -> list[Shape]:
        """Those of --alone that the matrix lacks."""
        shapes = [Shape(1, self.prompt_len, self.gen_len, depth) for depth in self.alone]
        return [shape for shape in shapes if shape not in self.matrix()]

    def needed(self, shapes: Sequence[Shape]) -> int:
        """Positions that a slot must hold to play these."""
        return max(needed_len(shape, self.wishes[0].prefill_chunk) for shape in shapes)


def run(options: LatencyOptions) -> int:
    """Load, say the ceiling, measure, report; exit code 1 if a pass failed. Raises QuartetError for what cannot be played."""
    output = options.output
    if options.plot is not None:
        require_matplotlib()
    require_folder(options.profile, "--profile")
    require_folder(options.plot, "--plot")
    if options.profile is not None and not options.counts:
        raise ConfigError("--profile keeps the profiler's trace and --no-counts leaves the profiler out; leave one of them out")
    if options.plot is not None and options.plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot {options.plot}: the picture is a PNG; give a name that ends in .png")
    source = find_model(options.model, options.revision, random_weights=options.random_weights)
    device = torch.device(resolve(options.wishes[0], source.config.dtype)[0].device)
    for wanted, flag in ((options.ladder, "--ladder"), (options.start, "--start")):
        if wanted and device.type != "cuda":
            raise ConfigError(f"{flag} measures kernels, graphs and compilation, and needs a CUDA device; leave it out here")
    ceiling = measure_ceiling(device)  # while the memory is still empty
    start = None
    if options.start:
        wish = replace(options.wishes[0], max_len=options.wishes[0].max_len or options.needed(options.matrix()))
        start = start_costs(options.model, options.revision, options.random_weights, wish)
    held = _hold(options, source)
    cells = _cells(options, held)
    formats = ", ".join(each.weights for each in held)
    title = f"bench latency: {source.label}, {held[0].loaded.config.dtype}, weights {formats}, {describe(device)}"
    output.begin(title, _notes(options, held, ceiling, cells))

    counts: list[Seen] = [None] * len(cells)
    states = {"before": gpu_state() if device.type == "cuda" else None}
    if play(cells, options.reps, options.warmup, output.say):
        states["after"] = gpu_state() if device.type == "cuda" else None
        if options.counts:
            counts = profile(cells, source.config.num_layers, device, options.profile, output.say)
    result = _result(options, held, ceiling, cells, counts) | {"gpu_state": states, "start": start}
    done = _report(options, result)
    output.end(done)
    if options.plot is not None:  # last: a full disk must not take the figures along
        options.plot.write_bytes(done.pictures[_title(result)])
    return 1 if result["failures"] else 0


@dataclass(frozen=True)
class Held:
    """A model with its projections in one format, the modes to play, and its engines, each with the shapes it plays: one with
    slots for the largest batch, and one of a single slot where --alone asks for longer contexts than all slots could hold."""

    weights: str
    loaded: Loaded
    modes: Sequence[tuple[str, str]]
    engines: Sequence[tuple[Engine, Sequence[Shape]]]


def _hold(options: LatencyOptions, source: ModelSource) -> list[Held]:
    """Every format's model, all at once, so that their cells can take turns; only what is measured is compiled."""
    matrix, alone = options.matrix(), options.alone_shapes()
    needed, longest = options.needed(matrix), options.needed([*matrix, *alone])
    formats: dict[str, list[EngineConfig]] = {}
    for wish in options.wishes:
        wish = replace(wish, max_slots=1) if alone else wish
        formats.setdefault(settle_weights(wish.weights, source.config.stored), []).append(wish)
    settled = resolve(options.wishes[0], source.config.dtype)[0]
    need = sum(source.config.weight_bytes(settled.dtype, weights) for weights in formats)
    free = free_bytes(torch.device(settled.device))
    if len(formats) > 1 and need > free:
        figures = f"need {need / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        raise OutOfMemoryError(f"weights {', '.join(formats)} are held at once: they {figures}; give one format a run")
    held: list[Held] = []
    for weights, wishes in formats.items():
        try:
            loaded, modes = load(source, wishes, longest)
            engines: list[tuple[Engine, Sequence[Shape]]] = [(loaded.engine, alone or matrix)]
            if alone:
                slots = replace(loaded.config, max_slots=options.wishes[0].max_slots, max_len=needed)
                engines.insert(0, (Engine(loaded.engine.model, slots), matrix))
        except OutOfMemoryError as error:
            already = "".join(f"{each.weights}, " for each in held)
            raise OutOfMemoryError(f"weights {already}{weights} are held at once: {error}; or give one format a run") from error
        for engine, _ in engines:
            played = dict.fromkeys(ops for ops, _ in modes)
            engine.modes.sets, engine.modes.kinds = OPS_SETS if options.ladder else list(played), ["plain"]
            engine.prepare()
        held.append(Held(weights, loaded, modes, engines))
    return held


def _cells(options: LatencyOptions, held: Sequence[Held]) -> list[Cell]:
    """Every mode of every format and, if asked for, the ladder's rungs and transformers, in every shape; those of one shape
    one after the other."""
    cells, order = [], [*options.matrix(), *options.alone_shapes()]
    for each in held:
        pdl = each.loaded.config.pdl == "on"
        for engine, shapes in each.engines:
            for run in _contenders(options, each, engine):
                apart = without_pdl(engine, run.graph) if options.counts and pdl and run.ops == "fused" else None
                cells += [_cell(each, each.weights, run, shape, apart) for shape in shapes]
    if options.against:
        first, model = held[0], held[0].loaded.engine.model
        assert isinstance(model, Decoder)
        hf = around(model, first.loaded.source.folder, model.dtype, "sdpa")
        for rival in [TransformersRun(hf, compiled) for compiled in ([False, True] if hf.device.type == "cuda" else [False])]:
            cells += [_cell(first, "bf16", rival, shape) for shape in order]
    return sorted(cells, key=lambda cell: order.index(cell.shape))


def _contenders(options: LatencyOptions, held: Held, engine: Engine) -> list[EngineRun]:
    """The modes, and the ladder's rungs that are not among them; the bench's own one multiplies dense weights only."""
    runs = [EngineRun(engine, ops, graph) for ops, graph in held.modes]
    if options.ladder:
        rungs = [*([bare(engine)] if held.weights == "bf16" else []), without_pdl(engine)]
        plain = [("unfused", "off"), ("unfused", "on"), *([("fused", "on")] if held.loaded.config.pdl == "on" else [])]
        runs += rungs + [EngineRun(engine, ops, graph) for ops, graph in plain if (ops, graph) not in held.modes]
    return runs


def _cell(held: Held, weights: str, run: Contender, shape: Shape, apart: Contender | None = None) -> Cell:
    """`weights`: those that the contender reads."""
    config, dtype = held.loaded.source.config, held.loaded.config.dtype
    weight_bytes = config.bytes_per_token(dtype, weights=weights)
    kv = config.bytes_per_token(dtype, int(shape.context())) - config.bytes_per_token(dtype)
    return Cell(run, shape, weight_bytes + shape.batch * kv, weight_bytes, apart, weights=weights)


def _notes(options: LatencyOptions, held: Sequence[Held], ceiling: Ceiling, cells: Sequence[Cell]) -> list[str]:
    """What is measured and how fast it could be at best, before anything is measured."""
    lines = [*dict.fromkeys(note for each in held for note in each.loaded.notes), str(ceiling)]
    if len(held) > 1:
        lines.append("one model for each format of the weights, all held at once; their cells take turns")
    if options.alone_shapes():
        rows = held[0].engines[0][0].config
        lines.append(f"beside it, over the same weights, {rows.max_slots} slots of {rows.max_len} positions for the batches")
    for (shape, weights), cell in {(cell.shape, cell.weights): cell for cell in cells}.items():
        floor_ms = ceiling.floor_ms(cell.step_bytes)
        lines.append(
            f"floor of batch {shape.batch} @ d{shape.depth}: {cell.weight_bytes / 1e9:.3f} GB weights ({weights}) and "
            f"{(cell.step_bytes - cell.weight_bytes) / 1e9:.3f} GB K/V a step, {floor_ms:.3f} ms, "
            f"at most {1e3 * shape.batch / floor_ms:.1f} tok/s"
        )
    lines.append(f"warm-up, full length, not counted: {options.warmup}; then {options.reps} reps of every cell, in turns")
    lines.append(f"{options.prompt_len} prompt tokens of random ids, {options.gen_len} answer tokens, greedy, no end ids")
    if any((*options.depth, *options.alone)):
        lines.append("depth: random K and V on the device in place of prefilling, in front of the prompt")
    cuda = held[0].loaded.config.device == "cuda"
    if options.against:
        over = "the same weights" if held[0].weights == "bf16" else f"the {held[0].weights} weights made dense"
        compiled = "torch.compile reduce-overhead, static cache" if cuda else "played on CUDA only"
        lines += [f"transformers: eager mode, SDPA attention, dynamic cache, over {over}", f"transformers compiled: {compiled}"]
    if not cuda:
        lines.append("on a CPU: token times and bytes; launches, busy times, boundaries and start costs need a CUDA device")
    return lines


def _result(
    options: LatencyOptions, held: Sequence[Held], ceiling: Ceiling, cells: Sequence[Cell], counts: Sequence[Seen]
) -> dict[str, Any]:
    first = held[0].loaded
    config, dtype, device = first.source.config, first.config.dtype, torch.device(first.config.device)
    warnings = (report.above_ceiling(cell, ceiling) for cell in cells)
    found = [report.cell_json(cell, seen, ceiling) for cell, seen in zip(cells, counts, strict=True)]
    own = {f"weights, {each.weights}": each.loaded.weight_bytes for each in held}
    own |= {f"kv_cache beside {each.weights}": sum(engine.cache.nbytes for engine, _ in each.engines) for each in held}
    return {
        "bench": "latency",
        "environment": environment(device, options.flags, options.model, dtype, [each.weights for each in held]),
        "model": first.source.label,
        "notes": {each.weights: each.loaded.notes for each in held},
        "parameters": config.num_parameters,
        "kv_bytes_per_position": config.kv_bytes_per_position(dtype),
        "load_seconds": {each.weights: each.loaded.load_seconds for each in held},
        "memory_bytes": own | memory(device),
        "ceiling": {"read_gbps": ceiling.measured_gbps, "how": ceiling.how, "datasheet_gbps": ceiling.datasheet_gbps},
        "formulas": FORMULAS | report.PARTS | {"boundary_us": report.BOUNDARY, "launch_overhead_us": report.OVERHEAD},
        "percentiles": METHOD,
        "cells": found,
        "split": report.split(found),
        "ratios": report.ratios(found),
        "ladder": report.ladder(found, RUNGS) if options.ladder else None,
        "failures": sum(len(cell.failures) for cell in cells),
        "warnings": [text for text in warnings if text is not None],
    }


def _title(result: dict[str, Any]) -> str:
    return f"{result['model']}: where a token's time goes"


def _report(options: LatencyOptions, result: dict[str, Any]) -> Report:
    """The tables of a result, and its picture where one was asked for or a page has room for it."""
    cells, title = result["cells"], _title(result)
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
        # Without a profile (a CPU run) all beyond the floor counts as kernels.
        busy = [{**cell, "profile": {"busy_ms": cell["p50_itl_ms"]}} for cell in cells]
        pictures[title] = token_time(title, result["split"] or report.split(busy))
    records = [{"model": result["model"], **cell} for cell in cells]
    return Report(result, tables, report.footnotes(result), records, pictures)
