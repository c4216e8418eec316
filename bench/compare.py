"""Owns `bench compare`: two results of one command, thing by thing, and whether the second is slower past a threshold.

Does not measure. Lower is better in everything it compares.
"""

import json
import math
from pathlib import Path
from typing import Any

from bench.output import Output, Report
from bench.report import cell_name
from bench.samples import INTERVAL, Reps, percentile, ratio_interval
from runtime.errors import ConfigError

SAME = ("gpu", "driver", "torch", "triton", "transformers", "python", "model", "dtype")


def read(path: Path) -> dict[str, Any]:
    """A result: a file's last line, as every command's last line and its `-o json` file is.

    Raises:
        ConfigError: no such file, or something else in it.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, RecursionError):
        result = None
    kinds = {"bench": str, "environment": dict}
    if not isinstance(result, dict) or not all(isinstance(result.get(name), kind) for name, kind in kinds.items()):
        raise ConfigError(f"{path} holds no result of a bench command; a run with `-o json --output RESULT.json` writes one")
    return result


def samples(result: dict[str, Any], path: Path) -> dict[str, Reps]:
    """What was timed, by name, as samples of each rep.

    Raises:
        ConfigError: `path` holds something else where they should be.
    """
    try:
        if result["bench"] == "latency":
            cells = {
                f"{cell_name(cell)} pp{cell['prompt_len']} tg{cell['gen_len']} ITL ms": cell["raw"]["itl_ms"]
                for cell in result["cells"]
            }
        else:
            cells = {name: [[each] for each in found] for name, found in result.get("measured", {}).items()}
        found = {name: [rep for rep in reps if rep] for name, reps in cells.items()}
        sound = all(0 < each < math.inf for reps in found.values() for rep in reps for each in rep)
    except (AttributeError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ConfigError(
            f"{path} does not hold its samples as bench {result['bench']} writes them now, each above 0; measure again"
        )
    return {name: reps for name, reps in found.items() if reps}


def run(first: Path, second: Path, threshold: float, output: Output) -> int:
    """Compare and report; exit code 1 if any median rose by more than `threshold` (a share, such as 0.05) and the interval of
    the ratio, where there is one, holds no 1.

    Raises:
        ConfigError: a file that holds no result, or results of different commands or of nothing in common.
    """
    a, b = read(first), read(second)
    if a["bench"] != b["bench"]:
        raise ConfigError(
            f"{first} is a result of bench {a['bench']} and {second} of bench {b['bench']}; give two of one command"
        )
    ours, theirs = samples(a, first), samples(b, second)
    common = [name for name in ours if name in theirs]
    if not common:
        raise ConfigError(f"{first} and {second} have nothing timed in common; compare runs with the same flags")
    rows = [_row(name, ours[name], theirs[name], threshold) for name in common]
    machines = {key: [each["environment"].get(key) for each in (a, b)] for key in SAME}
    notes = [
        f"A: {first}",
        f"B: {second}",
        f"B may be slower by {100 * threshold:g} %",
        *(f"differs: {key} {one} and {other}" for key, (one, other) in machines.items() if one != other),
    ]
    missing = sorted(set(ours) ^ set(theirs))
    output.begin(f"bench compare: {a['bench']}", [*notes, *(f"only in one of them: {name}" for name in missing)])
    slower = [row["what"] for row in rows if row["verdict"] == "slower"]
    result = {"bench": "compare", "environment": b["environment"], "threshold": threshold, "rows": rows, "slower": slower}
    output.end(Report(result, {"B against A": rows}, [INTERVAL, f"slower past the threshold: {len(slower)} of {len(rows)}"]))
    return 1 if slower else 0


def _row(name: str, ours: Reps, theirs: Reps, threshold: float) -> dict[str, Any]:
    a, b = (percentile([each for rep in reps for each in rep], 50) for reps in (ours, theirs))
    interval, verdict = ratio_interval(ours, theirs, paired=False), "same"
    for side, word in ((1, "slower"), (-1, "faster")):
        if side * (b / a - 1) > threshold and (interval is None or not interval[0] <= 1 <= interval[1]):
            verdict = word
    low, high = interval or (None, None)
    return {"what": name, "A": a, "B": b, "B / A": b / a, "from": low, "to": high, "verdict": verdict}
