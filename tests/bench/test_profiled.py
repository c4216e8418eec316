"""Counts read off trace events, as the profiler writes them."""

import gzip
import json
from collections import Counter

import pytest
import torch

from bench.contenders import EngineRun, needed_len
from bench.profiled import busy_us, count, per_layer, profile, record
from bench.timing import Cell, Shape
from runtime.config import EngineConfig
from runtime.engine import Engine
from tests.runtime.fake import FakeModel


def step(start, layers, correlation, graph):
    """Events of one decode step: an embedding, three kernels a layer, a head, a copy to the host; 10 us each, 1 us apart."""
    names = ["embed", *["norm", "gemm", "gemm"] * layers, "head"]
    events = []
    for i, name in enumerate([*names, "copy"]):
        category = "gpu_memcpy" if name == "copy" else "kernel"
        launch = correlation if graph and category == "kernel" else correlation + i
        args = {"correlation": launch}
        events.append({"ph": "X", "cat": category, "name": name, "ts": start + 11 * i, "dur": 10, "args": args})
    return events


@pytest.mark.parametrize(("graph", "launches"), [(False, 3 * 4 + 3), (True, 2)])
def test_kernels_and_launches_of_a_step_are_counted(graph, launches):
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}]
    for i in range(5):
        events += step(1000 * i, 4, 100 * (i + 1), graph)
    counts = count(events, steps=5, layers=4)
    assert counts.kernels == 14
    assert counts.copies == 1
    assert counts.launches == launches
    assert counts.kernels_per_layer == 3
    assert counts.busy_ms == pytest.approx(15 * 10 / 1e3)


def test_a_trace_without_kernels_gives_no_counts():
    assert count([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}], steps=1, layers=2) is None


def test_overlapping_kernels_are_busy_once():
    assert busy_us([(0, 10), (5, 10), (6, 2), (20, 5)]) == 20


@pytest.mark.parametrize(
    ("names", "layers", "period"),
    [
        ("e" + "abab" * 3 + "h", 3, 4),  # a layer may hold a repeat
        ("e" + "abc" * 32 + "nh", 32, 3),
        ("xabcdefh", 2, None),
        ("eaaaah", 4, 1),
        ("eabh", 1, None),
    ],
)
def test_a_layers_kernels_are_those_that_come_once_a_layer(names, layers, period):
    assert per_layer(Counter(names), layers) == period


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_kept_where_it_was_asked_for(tmp_path, name):
    path = tmp_path / name
    events = record(lambda: torch.ones(4) + 1, path, cuda=False)
    assert any(event.get("name") == "aten::add" for event in events)
    data = path.read_bytes()
    assert "traceEvents" in json.loads(gzip.decompress(data) if name.endswith("gz") else data)


def test_cells_have_traces_of_their_own(tmp_path):
    model = FakeModel()
    shape = Shape(2, 8, 12, 0)
    config = EngineConfig("cpu", "float32", "unfused", "off", "off", max_len=needed_len(shape, 8), max_slots=2, prefill_chunk=8)
    run = EngineRun(Engine(model, config), "unfused", "off")
    cells = [Cell(run, shape, 1, 1), Cell(run, Shape(1, 8, 12, 0), 1, 1), Cell(run, Shape(1, 8, 5, 0), 1, 1)]
    notes = profile(cells, 1, torch.device("cpu"), tmp_path / "t.json.gz", lambda text: None)
    assert {path.name for path in tmp_path.iterdir()} == {f"t-unfused-off-batch-{b}-depth-0.json.gz" for b in (1, 2)}
    assert notes == [None, None, "gen_len 5 is too short to profile; 6 or more are needed"]
    assert not run.engine.has_work
