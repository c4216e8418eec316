"""Owns what is said of latency cells: statistics, shares of the floor, where a token's time goes, ratios between cells, tables.

Does not own where the samples come from (timing, profiled) or how a report is written (output).
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench import timing
from bench.ceiling import Ceiling
from bench.output import number
from bench.profiled import Counts
from bench.samples import INTERVAL, METHOD, P99_NEEDS, mean_and_deviation, median_interval, ratio_interval, summary
from bench.timing import FORMULAS, Cell

RANKS = {"ITL p50": "p50", "p90": "p90", "p99": "p99", "max": "max"}
PARTS = {
    "floor": "weights and K/V over the read ceiling of this run",
    "kernels": "device busy (PDL off) beyond the floor, at most the token's time: kernels that do not read at the ceiling",
    "gaps": "token's time beyond busy, with graph on; with graph off, as much as the same ops with graph on have",
    "host": "the rest of the token's time with graph off: the device waits for launches",
}
"""What a token's time (ITL p50) is split into, in ms."""
BOUNDARY = "boundary us: (ITL p50 - floor) / kernels a step, what each kernel costs beyond its bytes"
OVERHEAD = "launch overhead us: (ITL p50 - busy) / kernels a step, what each launch leaves the device idle"


def cell_json(cell: Cell, counts: Counts | str | None, ceiling: Ceiling) -> dict[str, Any]:
    """Everything measured in a cell: statistics under vLLM's key names (`mean_tpot_ms`, `p99_itl_ms`, ...), raw samples.

    Args:
        counts: what the profiler saw, or why it saw nothing.
    """
    passes = cell.passes
    ttft_ms = [[_ms(t) for t in p.first] for p in passes]
    itl_ms = [[_ms(gap) for gap in p.gaps] for p in passes]
    end_to_end_ms = [_ms(p.end_to_end) for p in passes]
    figures = {
        **summary("ttft_ms", [t for each in ttft_ms for t in each]),
        **summary("itl_ms", [gap for each in itl_ms for gap in each]),
        **summary("tpot_ms", [1e3 * p.tpot for p in passes]),
        **mean_and_deviation("end_to_end_ms", end_to_end_ms),
        **mean_and_deviation("decode_tok_s", [p.decode_rate for p in passes]),
        **mean_and_deviation("prefill_tok_s", [p.prefill_rate for p in passes]),
        **mean_and_deviation("end_to_end_tok_s", [p.end_to_end_rate for p in passes]),
    }
    floor_ms, mean, p50 = ceiling.floor_ms(cell.step_bytes), figures["mean_tpot_ms"], figures["p50_itl_ms"]
    gbps = cell.step_bytes / mean / 1e6 if mean else None
    seen = counts if isinstance(counts, Counts) and p50 else None
    return {
        "ops": cell.contender.ops,
        "graph": cell.contender.graph,
        "weights": cell.weights,
        **asdict(cell.shape),
        "passes": len(passes),
        "failures": cell.failures,
        **figures,
        "p50_itl_ms_interval": median_interval(itl_ms),
        "step_bytes": cell.step_bytes,
        "step_weight_bytes": cell.weight_bytes,
        "step_kv_bytes": cell.step_bytes - cell.weight_bytes,
        "floor_ms": floor_ms,
        "floor_tok_s": 1e3 * cell.shape.batch / floor_ms,
        "datasheet_floor_ms": cell.step_bytes / ceiling.datasheet_gbps / 1e6 if ceiling.datasheet_gbps else None,
        "read_gbps": gbps,
        "share_of_read_ceiling": gbps / ceiling.measured_gbps if gbps else None,
        "share_of_datasheet": gbps / ceiling.datasheet_gbps if gbps and ceiling.datasheet_gbps else None,
        "boundary_us": (p50 - floor_ms) / seen.kernels * 1e3 if seen and p50 else None,
        "launch_overhead_us": max(0.0, p50 - seen.busy_ms) / seen.kernels * 1e3 if seen and p50 else None,
        "profile": asdict(counts) if isinstance(counts, Counts) else None,
        "profile_note": counts if isinstance(counts, str) else None,
        "raw": {
            "ttft_ms": ttft_ms,
            "itl_ms": itl_ms,
            "end_to_end_ms": end_to_end_ms,
            "decode_tokens": [p.decode_tokens for p in passes],
            "tokens": [p.tokens for p in passes],
        },
    }


def split(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a token's time goes in each cell that was profiled, by PARTS; the parts add up to ITL p50."""
    known = [cell for cell in cells if cell["profile"] is not None and cell["p50_itl_ms"]]
    idle = {cell_name(cell): max(0.0, cell["p50_itl_ms"] - max(cell["floor_ms"], cell["profile"]["busy_ms"])) for cell in known}
    found = []
    for cell in known:
        wall, rest = cell["p50_itl_ms"], idle[cell_name(cell)]
        floor = min(cell["floor_ms"], wall)
        gaps = rest if cell["graph"] == "on" else min(rest, idle.get(cell_name({**cell, "graph": "on"}), 0.0))
        found.append(
            {"name": cell_name(cell), "floor": floor, "kernels": wall - rest - floor, "gaps": gaps, "host": rest - gaps}
        )
    return found


def ratios(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times the first cell's time each other cell of its shape takes, with the interval."""
    table = []
    for cell in cells:
        first = next(each for each in cells if (each["batch"], each["depth"]) == (cell["batch"], cell["depth"]))
        if cell is not first and cell["p50_itl_ms"] and first["p50_itl_ms"]:
            ratio = cell["p50_itl_ms"] / first["p50_itl_ms"]
            low, high = ratio_interval(first["raw"]["itl_ms"], cell["raw"]["itl_ms"], paired=True) or (None, None)
            names = {"cell": cell_name(cell), "over": cell_name(first)}
            table.append({**names, "ratio of ITL p50": ratio, "from": low, "to": high})
    return table


def ladder(cells: Sequence[dict[str, Any]], rungs: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Of each shape, rung after rung (ops, graph, what it changes): the time and what this one change was worth."""
    table = []
    shape = ("weights", "batch", "depth")
    for key in dict.fromkeys(tuple(cell[name] for name in shape) for cell in cells):
        here = {(c["ops"], c["graph"]): c for c in cells if tuple(c[name] for name in shape) == key}
        before: float | None = None
        for ops, graph, change in rungs:
            ms = here[ops, graph]["p50_itl_ms"] if (ops, graph) in here else None
            saved = before - ms if before and ms else None
            table.append({"rung": change, **dict(zip(shape, key, strict=True)), "ITL p50 ms": ms, "saved ms": saved})
            before = ms
    return table


def above_ceiling(cell: Cell, ceiling: Ceiling) -> str | None:
    """A warning if any pass was faster than its bytes can be read."""
    floor_ms = ceiling.floor_ms(cell.step_bytes)
    fastest = min((1e3 * p.tpot for p in cell.passes), default=floor_ms)
    if fastest >= floor_ms:
        return None
    return (
        f"{cell}: a pass took {fastest:.4f} ms a token, above the floor's rate: reading its bytes takes {floor_ms:.4f} ms; "
        "either they fit in a cache or the clock is wrong"
    )


def rows(model: str, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """llama-bench's rows of each cell: `pp512` the prefill, `tg128 @ d0` the decode, `pp512+tg128` end to end."""
    table = []
    for cell in cells:
        pp, tg, depth = f"pp{cell['prompt_len']}", f"tg{cell['gen_len']}", f" @ d{cell['depth']}"
        few = cell["p99_itl_ms_has_few_samples"] and cell["n_itl_ms"]
        base = {"model": model, **{key: cell[key] for key in ("weights", "ops", "graph", "batch")}}
        decode = {f"{word} ms": number(cell[f"{rank}_itl_ms"]) for word, rank in RANKS.items()}
        decode["p99 ms"] += "*" if few else ""
        ttft = _mean(cell, "ttft_ms")
        shares = {"of floor": "share_of_read_ceiling", "of datasheet": "share_of_datasheet"}
        decode |= {word: f"{100 * cell[key]:.1f}%" if cell[key] else "" for word, key in shares.items()}
        table += [
            {**base, "test": pp + depth, "tok/s": _mean(cell, "prefill_tok_s"), **dict.fromkeys(decode), "TTFT ms": ttft},
            {**base, "test": tg + depth, "tok/s": _mean(cell, "decode_tok_s"), **decode},
            {**base, "test": f"{pp}+{tg}{depth}", "tok/s": _mean(cell, "end_to_end_tok_s")},
        ]
    return table


def count_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the profiler counted, a row for each cell that has it. Counts are exact: a fraction says that steps differed."""
    return [
        {key: cell[key] for key in ("weights", "ops", "graph", "batch", "depth")}
        | {
            "kernels/step": f"{counts['kernels']:g}",
            "kernels/layer": counts["kernels_per_layer"] or "none repeats",
            "copies/step": f"{counts['copies']:g}",
            "launches/step": f"{counts['launches']:g}",
            "busy ms/step": counts["busy_ms"],
            "boundary us": cell["boundary_us"],
            "launch overhead us": cell["launch_overhead_us"],
        }
        for cell in cells
        if (counts := cell["profile"]) is not None
    ]


def footnotes(result: dict[str, Any]) -> list[str]:
    """Formulas, the percentiles' method, failures and warnings of a whole result."""
    cells = result["cells"]
    lines = [f"{name}: {formula}" for name, formula in FORMULAS.items()]
    samples = ", ".join(dict.fromkeys(str(cell["n_itl_ms"]) for cell in cells))
    lines.append(f"percentiles: {METHOD}; n = {samples} gaps a cell; ± is the deviation over the reps")
    if any(cell["p99_itl_ms_has_few_samples"] for cell in cells):
        lines.append(f"\\*: a p99 of fewer than {P99_NEEDS} samples is nearly their maximum")
    lines.append("of floor: step_bytes / mean tpot_ms / read ceiling; of datasheet: the same over the datasheet's rate")
    lines.append(f"intervals: {INTERVAL}")
    if any(cell["profile"] for cell in cells):
        lines += [BOUNDARY, OVERHEAD, *(f"{part}: {formula}" for part, formula in PARTS.items())]
        lines.append("counts and busy times: a pass of its own with PDL off, where no kernel waits inside another's time")
    if result["start"] is None:
        lines.append("start costs: not measured; --start measures them, cold and warm, on a GPU")
    lines.append(f"failed passes: {result['failures']}")
    for cell in cells:
        lines += [f"failed: {cell_name(cell)}, {text}" for text in cell["failures"]]
        lines += [f"not profiled: {cell_name(cell)}, {cell['profile_note']}"] if cell["profile_note"] else []
    return [*lines, *(f"warning: {text}" for text in result["warnings"])]


def cell_name(cell: dict[str, Any]) -> str:
    """As `timing.cell_name`. Results from before there were formats are of dense weights."""
    return timing.cell_name(cell["ops"], cell["graph"], cell.get("weights", "bf16"), cell["batch"], cell["depth"])


def _ms(seconds: float) -> float:
    """Milliseconds to 10 ns, finer than any clock here."""
    return round(1e3 * seconds, 5)


def _mean(cell: dict[str, Any], name: str) -> str:
    mean, deviation = cell[f"mean_{name}"], cell[f"std_{name}"]
    return "failed" if mean is None else number(mean) + ("" if deviation is None else f" ± {number(deviation)}")
