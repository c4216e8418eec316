"""Owns what is said of latency cells: statistics, JSON, Markdown tables, CSV. Does not own where the samples come from."""

import csv
import io
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.ceiling import Ceiling
from bench.profiled import Counts
from bench.timing import FORMULAS, Cell

METHOD = "linear interpolation between the two nearest ranks"
P99_NEEDS = 100
"""With fewer samples than this a p99 is nearly the maximum, and is flagged."""
FIGURES = ("tok/s", "ITL p50 ms", "p90 ms", "p99 ms", "max ms", "TTFT ms", "of floor", "of datasheet")


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of at least one sample, by linear interpolation, as numpy's default does."""
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def mean_and_deviation(name: str, samples: Sequence[float]) -> dict[str, float | None]:
    """mean_ and std_ (sample deviation, n - 1) of `name`; None where there are too few samples."""
    return {
        f"mean_{name}": statistics.fmean(samples) if samples else None,
        f"std_{name}": statistics.stdev(samples) if len(samples) > 1 else None,
    }


def summary(name: str, samples: Sequence[float]) -> dict[str, float | int | bool | None]:
    """mean_, std_, median_, p50_ (the same), p90_, p99_, max_ and n_ of `name`; None without samples."""
    ranks = {"median": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {
        **mean_and_deviation(name, samples),
        **{f"{word}_{name}": percentile(samples, q) if samples else None for word, q in ranks.items()},
        f"n_{name}": len(samples),
        f"p99_{name}_has_few_samples": len(samples) < P99_NEEDS,
    }


def text(format: str, result: dict[str, Any]) -> str:
    """A whole result as "md", "csv", "jsonl" or "json"."""
    model, cells = result["model"], result["cells"]
    if format == "md":
        tables = [markdown(table) for table in (rows(model, cells), count_rows(cells)) if table]
        return "\n\n".join([*tables, footnotes(result)])
    if format == "csv":
        return csv_text(cells)
    if format == "jsonl":
        return "\n".join(json_text({"model": model, **cell}) for cell in cells)
    return json_text(result)


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
    floor_ms, mean = ceiling.floor_ms(cell.step_bytes), figures["mean_tpot_ms"]
    gbps = cell.step_bytes / mean / 1e6 if mean else None
    return {
        "ops": cell.contender.ops,
        "graph": cell.contender.graph,
        **asdict(cell.shape),
        "passes": len(passes),
        "failures": cell.failures,
        **figures,
        "step_bytes": cell.step_bytes,
        "step_weight_bytes": cell.weight_bytes,
        "step_kv_bytes": cell.step_bytes - cell.weight_bytes,
        "floor_ms": floor_ms,
        "floor_tok_s": 1e3 * cell.shape.batch / floor_ms,
        "read_gbps": gbps,
        "share_of_read_ceiling": gbps / ceiling.measured_gbps if gbps else None,
        "share_of_datasheet": gbps / ceiling.datasheet_gbps if gbps and ceiling.datasheet_gbps else None,
        "profile": _counts_json(counts) if isinstance(counts, Counts) else None,
        "profile_note": counts if isinstance(counts, str) else None,
        "raw": {
            "ttft_ms": ttft_ms,
            "itl_ms": itl_ms,
            "end_to_end_ms": end_to_end_ms,
            "decode_tokens": [p.decode_tokens for p in passes],
            "tokens": [p.tokens for p in passes],
        },
    }


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


def rows(model: str, cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """llama-bench's rows of each cell: `pp512` the prefill, `tg128 @ d0` the decode, `pp512+tg128` end to end."""
    table = []
    for cell in cells:
        base = {"model": model, **{key: str(cell[key]) for key in ("ops", "graph", "batch")}, "test": ""}
        base |= dict.fromkeys(FIGURES, "")
        pp, tg, depth = f"pp{cell['prompt_len']}", f"tg{cell['gen_len']}", f" @ d{cell['depth']}"
        flag = "*" if cell["p99_itl_ms_has_few_samples"] and cell["n_itl_ms"] else ""
        decode = {
            "ITL p50 ms": _number(cell["p50_itl_ms"], 3),
            "p90 ms": _number(cell["p90_itl_ms"], 3),
            "p99 ms": _number(cell["p99_itl_ms"], 3) + flag,
            "max ms": _number(cell["max_itl_ms"], 3),
            "of floor": _percent(cell["share_of_read_ceiling"]),
            "of datasheet": _percent(cell["share_of_datasheet"]),
        }
        table += [
            {**base, "test": pp + depth, "tok/s": _rate(cell, "prefill_tok_s"), "TTFT ms": _rate(cell, "ttft_ms")},
            {**base, "test": tg + depth, "tok/s": _rate(cell, "decode_tok_s"), **decode},
            {**base, "test": f"{pp}+{tg}{depth}", "tok/s": _rate(cell, "end_to_end_tok_s")},
        ]
    return table


def count_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """What the profiler counted, a row for each cell that has it. Counts are exact: a fraction says that steps differed."""
    table = []
    for cell in cells:
        if (counts := cell["profile"]) is not None:
            per_layer = counts["kernels_per_layer"]
            table.append(
                {key: str(cell[key]) for key in ("ops", "graph", "batch", "depth")}
                | {
                    "kernels/step": f"{counts['kernels']:g}",
                    "kernels/layer": "none repeats" if per_layer is None else str(per_layer),
                    "copies/step": f"{counts['copies']:g}",
                    "launches/step": f"{counts['launches']:g}",
                    "busy ms/step": f"{counts['busy_ms']:.3f}",
                }
            )
    return table


def markdown(table: Sequence[dict[str, str]]) -> str:
    """A Markdown table of at least one row, columns padded so that it reads in a terminal too."""
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    lines = [[name.ljust(width) for name, width in widths.items()], ["-" * width for width in widths.values()]]
    lines += [[row[name].ljust(width) for name, width in widths.items()] for row in table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def footnotes(result: dict[str, Any]) -> str:
    """Formulas, the percentiles' method, failures and warnings of a whole result."""
    cells = result["cells"]
    lines = [f"{name}: {formula}" for name, formula in FORMULAS.items()]
    samples = ", ".join(dict.fromkeys(str(cell["n_itl_ms"]) for cell in cells))
    lines.append(f"percentiles: {METHOD}; n = {samples} gaps a cell; ± is the deviation over the reps")
    if any(cell["p99_itl_ms_has_few_samples"] for cell in cells):
        lines.append(f"\\*: a p99 of fewer than {P99_NEEDS} samples is nearly their maximum")
    lines.append("of floor: step_bytes / mean tpot_ms / read ceiling; of datasheet: the same over the datasheet's rate")
    lines.append(f"failed passes: {result['failures']}")
    for cell in cells:
        name = f"{cell['ops']}/{cell['graph']} batch {cell['batch']} depth {cell['depth']}"
        lines += [f"failed: {name}, {text}" for text in cell["failures"]]
        lines += [f"not profiled: {name}, {cell['profile_note']}"] if cell["profile_note"] else []
    return "\n".join(f"- {line}" for line in [*lines, *(f"warning: {text}" for text in result["warnings"])])


def csv_text(cells: Sequence[dict[str, Any]]) -> str:
    """One line for each cell: every figure that is a plain value."""
    plain = [{key: value for key, value in cell.items() if key not in ("failures", "profile", "raw")} for cell in cells]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(plain[0]))
    writer.writeheader()
    writer.writerows(plain)
    return out.getvalue().rstrip()


def json_text(value: Any) -> str:
    """Strict JSON on one line."""
    return json.dumps(value, allow_nan=False)


def _ms(seconds: float) -> float:
    """Milliseconds to 10 ns, finer than any clock here."""
    return round(1e3 * seconds, 5)


def _counts_json(counts: Counts) -> dict[str, Any]:
    fields = asdict(counts)
    fields["kernel_names"] = dict(Counter(fields.pop("names")))  # a step of an eager model holds over a thousand
    return fields


def _rate(cell: dict[str, Any], name: str) -> str:
    mean, deviation = cell[f"mean_{name}"], cell[f"std_{name}"]
    return _number(mean, 2) + ("" if deviation is None else f" ± {deviation:.2f}")


def _number(value: float | None, digits: int) -> str:
    return "failed" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"
