"""Owns how latency results look: JSON, Markdown tables, CSV, JSON lines. Does not own where the figures come from."""

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.ceiling import Ceiling
from bench.cells import Cell
from bench.percentiles import mean_and_deviation, summary
from bench.profiled import Counts

HEAD = (
    "model",
    "ops",
    "graph",
    "batch",
    "test",
    "tok/s",
    "ITL p50 ms",
    "p90 ms",
    "p99 ms",
    "max ms",
    "TTFT ms",
    "of floor",
    "of datasheet",
)
PER_STEP = ("kernels/step", "kernels/layer", "copies/step", "launches/step", "busy ms/step")


def cell_json(cell: Cell, ceiling: Ceiling) -> dict[str, Any]:
    """Everything measured in a cell: statistics under vLLM's key names (`mean_tpot_ms`, `p99_itl_ms`, ...), raw samples."""
    shape, passes = cell.shape, cell.passes
    ttft_ms = [[_ms(t) for t in p.first] for p in passes]
    itl_ms = [[_ms(gap) for gap in p.gaps] for p in passes]
    end_to_end_ms = [_ms(p.end_to_end) for p in passes]
    statistics = {
        **summary("ttft_ms", [t for each in ttft_ms for t in each]),
        **summary("itl_ms", [gap for each in itl_ms for gap in each]),
        **summary("tpot_ms", [1e3 * p.tpot for p in passes]),
        **mean_and_deviation("end_to_end_ms", end_to_end_ms),
        **mean_and_deviation("decode_tok_s", [p.decode_rate for p in passes]),
        **mean_and_deviation("prefill_tok_s", [p.prefill_rate for p in passes]),
        **mean_and_deviation("end_to_end_tok_s", [p.end_to_end_rate for p in passes]),
    }
    floor_ms, mean = ceiling.floor_ms(cell.step_bytes), statistics["mean_tpot_ms"]
    gbps = cell.step_bytes / mean / 1e6 if mean else None
    return {
        "ops": cell.ops,
        "graph": cell.graph,
        **asdict(shape),
        "passes": len(passes),
        "failures": cell.failures,
        **statistics,
        "step_bytes": cell.step_bytes,
        "step_weight_bytes": cell.weight_bytes,
        "step_kv_bytes": cell.step_bytes - cell.weight_bytes,
        "floor_ms": floor_ms,
        "floor_tok_s": 1e3 * shape.batch / floor_ms,
        "read_gbps": gbps,
        "share_of_read_ceiling": gbps / ceiling.measured_gbps if gbps else None,
        "share_of_datasheet": gbps / ceiling.datasheet_gbps if gbps and ceiling.datasheet_gbps else None,
        "peak_bytes": cell.peak_bytes or None,
        "profile": _counts_json(cell.counts),
        "profile_note": cell.profile_note,
        "raw": {
            "ttft_ms": ttft_ms,
            "itl_ms": itl_ms,
            "end_to_end_ms": end_to_end_ms,
            "decode_tokens": [p.decode_tokens for p in passes],
            "tokens": [p.tokens for p in passes],
        },
    }


def rows(model: str, cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """llama-bench's rows of each cell: `pp512` the prefill, `tg128 @ d0` the decode, `pp512+tg128` end to end."""
    table = []
    for cell in cells:
        depth = f" @ d{cell['depth']}"
        base = {"model": model, "ops": cell["ops"], "graph": cell["graph"], "batch": str(cell["batch"])}
        pp, tg = f"pp{cell['prompt_len']}", f"tg{cell['gen_len']}"
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
    return [{name: row.get(name, "") for name in HEAD} for row in table]


def count_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """What the profiler counted, a row for each cell that has it."""
    table = []
    for cell in cells:
        counts = cell["profile"]
        if counts is not None:
            per_layer = "none repeats" if counts["kernels_per_layer"] is None else str(counts["kernels_per_layer"])
            values = [cell["ops"], cell["graph"], cell["batch"], cell["depth"], _count(counts["kernels"]), per_layer]
            values += [_count(counts["copies"]), _count(counts["launches"]), f"{counts['busy_ms']:.3f}"]
            table.append(dict(zip(("ops", "graph", "batch", "depth", *PER_STEP), map(str, values), strict=True)))
    return table


def markdown(table: Sequence[dict[str, str]]) -> str:
    """A Markdown table, columns padded so that it reads in a terminal too."""
    if not table:
        return ""
    head = list(table[0])
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in head}
    lines = [[name.ljust(widths[name]) for name in head], ["-" * widths[name] for name in head]]
    lines += [[row[name].ljust(widths[name]) for name in head] for row in table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_text(cells: Sequence[dict[str, Any]]) -> str:
    """One line for each cell: every figure that is a plain value."""
    plain = [{key: value for key, value in cell.items() if not isinstance(value, dict | list)} for cell in cells]
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


def _counts_json(counts: Counts | None) -> dict[str, Any] | None:
    if counts is None:
        return None
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


def _count(value: float) -> str:
    """Counts are exact; a fraction says that the profiled steps were not alike."""
    return f"{value:g}"
