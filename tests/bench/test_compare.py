"""`bench compare`: what counts as slower."""

import json
import math

import pytest

from bench.__main__ import run
from runtime.errors import ConfigError


def latency(path, scale, noise=0.0, bench="latency", ops="fused"):
    reps = [[scale * (3.0 + 0.01 * i + noise * (j % 2)) for i in range(20)] for j in range(5)]
    cell = {"ops": ops, "graph": "on", "batch": 1, "depth": 0, "prompt_len": 8, "gen_len": 9, "raw": {"itl_ms": reps}}
    path.write_text(json.dumps({"bench": bench, "environment": {"gpu": "G", "torch": str(scale)}, "cells": [cell]}))
    return str(path)


@pytest.mark.parametrize(
    ("scale", "code", "verdict"), [(1.0, 0, "same"), (1.04, 0, "same"), (1.2, 1, "slower"), (0.8, 0, "faster")]
)
def test_slower_past_the_threshold_is_exit_code_1(tmp_path, capsys, scale, code, verdict):
    words = ["compare", latency(tmp_path / "a", 1.0), latency(tmp_path / "b", scale), "--threshold", "5"]
    assert run(words) == code
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["verdict"] == verdict
    assert row["B / A"] == pytest.approx(scale)
    assert ("differs: torch" in out) == (scale != 1.0)


def test_a_difference_within_the_runs_own_noise_is_none(tmp_path, capsys):
    words = ["compare", latency(tmp_path / "a", 1.0, noise=1.5), latency(tmp_path / "b", 1.06, noise=1.5)]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["from"] < 1


def test_measured_things_of_other_commands_are_compared_by_name(tmp_path, capsys):
    for name, us in (("a", 1.0), ("b", 1.5)):
        result = {"bench": "launches", "environment": {}, "measured": {"torch op us": [us] * 3, f"only {name}": [1.0]}}
        (tmp_path / name).write_text(json.dumps(result))
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["slower"] == ["torch op us"]


def test_files_that_cannot_be_compared_are_one_sentence(tmp_path):
    a, other = latency(tmp_path / "a", 1.0), latency(tmp_path / "b", 1.0, bench="kernels")
    (tmp_path / "c").write_text("no result")
    with pytest.raises(ConfigError, match="give two of one command"):
        run(["compare", a, other])
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="holds no result"):
        run(["compare", a, str(tmp_path / "deep")])
    with pytest.raises(ConfigError, match="holds no result"):
        run(["compare", a, str(tmp_path / "c")])
    with pytest.raises(ConfigError, match="cannot be read"):
        run(["compare", a, str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="nothing timed in common"):
        run(["compare", a, latency(tmp_path / "d", 1.0, ops="unfused")])


@pytest.mark.parametrize(
    "cells",
    [None, [{}], [5], [{"raw": None}], [[[math.nan]]], [[[0.0]]], [[["x"]]], [[[None]]], [[5]]],
    ids=str,
)
def test_a_result_of_another_form_is_one_sentence(tmp_path, cells):
    a, b = latency(tmp_path / "a", 1.0), tmp_path / "b"
    result = json.loads((tmp_path / "a").read_text())
    if cells is not None and isinstance(cells[0], list):
        cells = [{**result["cells"][0], "raw": {"itl_ms": cells[0]}}]
    b.write_text(json.dumps({**result, "cells": cells}))
    for pair in ([a, str(b)], [str(b), a]):
        with pytest.raises(ConfigError, match="b does not hold its samples as bench latency writes them now, each above 0"):
            run(["compare", *pair])
