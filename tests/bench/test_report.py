"""What is said of latency cells: boundaries, where a token's time goes, ratios, the ladder, the picture."""

import pytest

from bench import report
from bench.ceiling import Ceiling
from bench.contenders import RUNGS
from bench.output import token_time
from bench.profiled import Counts
from bench.timing import Cell, Pass, Shape

CEILING = Ceiling(10.0, "given", 20.0)


def cell(ops, graph, itl_ms, busy_ms, kernels=100, reps=3):
    """What is told of a cell whose every gap is `itl_ms`, with a floor of 2 ms."""
    named = type("Named", (), {"ops": ops, "graph": graph})
    measured = Cell(named, Shape(1, 16, 5, 0), 20_000_000, 16_000_000)
    for _ in range(reps):
        measured.passes.append(Pass(measured.shape, (0.5,), (itl_ms / 1e3,) * 4, 4, 5, 0.5 + 4 * itl_ms / 1e3))
    counts = Counts(8, kernels, 0, 1, 5, busy_ms, {"k": kernels})
    return report.cell_json(measured, counts, CEILING)


def test_a_boundary_is_what_a_kernel_costs_beyond_its_bytes():
    found = cell("fused", "on", 3.0, 2.5)
    assert found["boundary_us"] == pytest.approx(10.0)  # 1 ms over 100 kernels
    assert found["launch_overhead_us"] == pytest.approx(5.0)  # 0.5 ms idle over 100
    assert found["datasheet_floor_ms"] == pytest.approx(1.0)
    assert found["p50_itl_ms_interval"] == pytest.approx((3.0, 3.0))


def test_busy_longer_than_the_token_leaves_no_overhead():
    """With PDL kernels overlap, and their times with PDL off add up to more than the token's."""
    found = cell("fused", "on", 3.0, 3.2)
    assert found["launch_overhead_us"] == 0.0
    (bar,) = report.split([found])
    assert (bar["kernels"], bar["gaps"], bar["host"]) == pytest.approx((1.0, 0.0, 0.0))


def test_a_tokens_time_is_split_and_adds_up():
    cells = [cell("unfused", "off", 20.0, 4.6), cell("unfused", "on", 5.0, 4.5), cell("fused", "off", 6.0, 3.5)]
    for bar, each in zip(report.split(cells), cells, strict=True):
        assert sum(bar[part] for part in report.PARTS) == pytest.approx(each["p50_itl_ms"])
    eager, graph, alone = report.split(cells)
    assert graph == pytest.approx({"name": graph["name"], "floor": 2.0, "kernels": 2.5, "gaps": 0.5, "host": 0.0})
    assert (eager["gaps"], eager["host"]) == pytest.approx((0.5, 14.9))
    assert (alone["gaps"], alone["host"]) == pytest.approx((0.0, 2.5))  # no graph beside it to tell gaps from waiting


def test_a_cell_without_a_profile_is_not_split():
    found = cell("fused", "on", 3.0, 2.5) | {"profile": None}
    assert report.split([found]) == []


def test_ratios_are_to_the_first_cell_of_a_shape():
    (row,) = report.ratios([cell("fused", "on", 3.0, 2.5), cell("unfused", "on", 6.0, 5.0)])
    assert row["ratio of ITL p50"] == pytest.approx(2.0)
    assert (row["from"], row["to"]) == pytest.approx((2.0, 2.0))
    (alone,) = report.ratios([cell("fused", "on", 3.0, 2.5, reps=1), cell("unfused", "on", 6.0, 5.0, reps=1)])
    assert alone["from"] is None


def test_each_rung_of_the_ladder_says_what_its_one_change_saved():
    times = (20.0, 5.0, 4.5, 3.5, 3.25)
    cells = [cell(ops, graph, ms, 2.5) for (ops, graph, _), ms in zip(RUNGS, times, strict=True)]
    rows = report.ladder(cells, RUNGS)
    assert [row["saved ms"] for row in rows] == [None, *(pytest.approx(each) for each in (15.0, 0.5, 1.0, 0.25))]
    assert [row["rung"] for row in rows] == [change for _, _, change in RUNGS]


def test_the_picture_is_a_png():
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    png = token_time("where a token's time goes", report.split([cell("fused", "on", 3.0, 2.5)]))
    assert png.startswith(b"\x89PNG")
