"""`bench roofline`: what a CPU is told, and predicted beside measured where times are given."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import kernels, profiled, roofline
from bench.__main__ import run
from bench.arithmetic import H200, SIZES, in_order, step_launches
from bench.ceiling import Ceiling
from bench.steps import Resources, StepsOptions, fold
from models.random_weights import SHAPES

CONFIG = SHAPES["llama-2-7b"]


def test_a_cpu_gets_the_arithmetic_of_an_h200(bench):
    printed = bench("roofline", "--model", "random:llama-2-7b", "--batch", "1")
    assert printed.code == 0
    assert "arithmetic only: no CUDA device here" in printed.out
    assert printed.out.index("predicted before the run: b1 fused") < printed.out.index("| launch")
    assert "saves boundaries, not HBM bytes" in printed.out
    assert printed.result["measured"] == {}
    assert printed.result["predicted"]["b1 fused"] < printed.result["predicted"]["b1 unfused"]
    assert "saves HBM bytes here too" in bench("roofline", "--model", "random:llama-2-7b", "--weights", "int4").out
    assert [each["name"] for each in printed.result["launches"]["b1 fused"]][1:3] == ["norm_qkv_rope", "attention"]


def test_the_cpus_own_ceilings_can_be_asked_for(bench):
    printed = bench("roofline", "--model", "random:llama-2-7b", "--batch", "1", "--gpu", "measured")
    assert "measured now on the CPU" in printed.out
    assert printed.result["ceilings"]["read_gbps"] != H200.read_gbps


def test_predicted_and_measured_stand_side_by_side():
    launches = step_launches(CONFIG, "bfloat16", 1, 512, "fused")
    times = {each.name: [2 * H200.predicted_us(each, False)] * 3 for each in launches}
    for row in roofline.rows(launches, H200, times):
        assert row["measured us"] == pytest.approx(2 * row["predicted us"])
        assert row["off"] == "-50.0%"


def test_a_fusion_gains_its_boundaries_and_no_hbm_bytes():
    plan = {(1, ops): step_launches(CONFIG, "bfloat16", 1, 512, ops) for ops in ("unfused", "fused")}
    times = {key: {each.name: [10.0] for each in launches} for key, launches in plan.items()}
    us = (1.0, *(size / H200.read_gbps / 1e3 + 2.0 for size in SIZES[1:]))
    ceilings = replace(H200, ways={way: us[: len(sizes)] for way, sizes in H200.ways.items()}, meeting_us=0.0)
    gains = {row["fused launch"]: row for row in roofline.gains(plan, 1, ceilings, times)}
    gate_up = gains["norm_gate_up"]
    assert gate_up["in place of"] == "norm 2 + gate + up + SiLU · up"
    assert gate_up["launches saved a step"] == 3 * 32
    assert gate_up["hbm MB saved"] == 0
    assert gate_up["measured gain us"] == pytest.approx(32 * 30)
    assert gate_up["predicted gain us"] == pytest.approx(32 * (2 * 1.0 + 2.0), rel=1e-3)  # two nodes, one boundary of two
    assert sum(row["launches saved a step"] for row in gains.values()) == 32 * 10 + 1


def test_a_split_gemm_of_cublas_is_one_launch():
    kernels = [("norm", 2.0), ("gemv_splitK_bf16", 5.0), ("cublasLt::splitKreduce_kernel", 1.5), ("add", 2.0)]
    assert fold(kernels) == [("norm", 2.0), ("gemv_splitK_bf16", 6.5), ("add", 2.0)]


def fake_ncu(folder, monkeypatch, body):
    """An `ncu` that runs `body` with the path of the log file as $log."""
    script = folder / "ncu"
    find = 'while [ "$1" != --log-file ]; do shift; done; log=$2\n'
    script.write_text(f"#!/bin/sh\n{find}{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(profiled.shutil, "which", lambda name: str(script))


def test_counters_are_read_from_ncus_page(tmp_path, monkeypatch):
    head = '"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sectors.sum"'
    lines = [
        "==PROF== Connected",
        head,
        '"","","","byte","byte","sector"',
        '"0","7","_a_kernel","100,663,296","2,048","3,146,000"',
    ]
    (tmp_path / "page").write_text("\n".join(lines))
    fake_ncu(tmp_path, monkeypatch, f'cp {tmp_path / "page"} "$log"')
    (kernel,) = profiled.counted("pass", 1)
    assert kernel == profiled.Counted("_a_kernel", 100663296, 2048, 3146000)


def test_missing_permission_is_told_in_words(tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, 'echo "==ERROR== ERR_NVGPUCTRPERM - no permission"; exit 1')
    assert profiled.counted("pass", 1) == profiled.FORBIDDEN


def test_a_missing_or_broken_ncu_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(profiled.shutil, "which", lambda name: None)
    assert "not installed" in profiled.counted("pass", 1)
    fake_ncu(tmp_path, monkeypatch, "echo unknown device; exit 3")
    assert profiled.counted("pass", 1) == "ncu counted nothing (exit code 3): unknown device"


WEIGHTS = ["bf16"]  # what was asked for last


class FakeSteps:
    """Whole steps on a GPU that is not there: every launch takes 10 us, every step 3 ms."""

    def __init__(self, loaded, batch, context):
        self.batch = batch

    def graph(self, ops):
        return ops.name

    eager = graph

    def ms(self, play):
        return [3.0, 3.1, 3.2]

    def launches_us(self, play):
        names = in_order(step_launches(CONFIG, "bfloat16", self.batch, 512, play, WEIGHTS[-1]))
        return [[(each.name, 10.0) for each in names]] * 2


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A machine with a GPU, as far as `bench roofline` and `bench kernels` can see."""

    def settled(self, source):
        WEIGHTS.append({"auto": "bf16"}.get(self.config["weights"], self.config["weights"]))
        return SimpleNamespace(device="cuda", dtype="bfloat16", pdl="on", weights=WEIGHTS[-1])

    monkeypatch.setattr(StepsOptions, "settled", settled)
    monkeypatch.setattr(StepsOptions, "load", lambda self: SimpleNamespace(config=settled(self, None)))
    monkeypatch.setattr(roofline, "measure_ceilings", lambda device: H200)
    monkeypatch.setattr(kernels, "measure_ceiling", lambda device: Ceiling(4610.0, "given", 4800.0))
    monkeypatch.setattr(kernels, "launched", lambda play: [Resources(40, 0)] * 163)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(profiled.shutil, "which", lambda name: None)
    for module in (roofline, kernels):
        monkeypatch.setattr(module, "WholeSteps", FakeSteps)
        monkeypatch.setattr(module, "environment", lambda *words: {"gpu": "pretended", "weights": words[-1]})


def test_on_a_gpu_the_prediction_comes_first_and_the_times_stand_beside_it(pretended_gpu, capsys):
    assert run(["roofline", "--model", "random:llama-2-7b", "--batch", "1", "--gpu", "measured"]) == 0
    out = capsys.readouterr().out
    assert out.index("### Predicted, fused, batch 1") < out.index("### One step, fused, batch 1")
    assert "counters: ncu (Nsight Compute) is not installed" in out
    result = json.loads(out.splitlines()[-1])
    assert set(result["measured"]) == {"b1 unfused", "b1 fused", "b1 fused with PDL"}
    (line,) = (line for line in out.splitlines() if line.startswith("| b1 fused with PDL "))
    floor, boundaries, predicted, extra, measured = (float(cell) for cell in line.split("|")[2:7])
    assert predicted == pytest.approx(floor + boundaries, abs=1e-3)
    assert (measured, extra) == (3.1, pytest.approx(3.1 - floor, abs=1e-3))


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_formats_of_weights_have_bytes_and_names_of_their_own(pretended_gpu, capsys, weights):
    """`bench compare` pairs what has one name: two formats must have none in common."""
    words = ["--model", "random:llama-2-7b", "--batch", "1"]
    named = {}
    for each in ("bf16", weights):
        for command in (["roofline", "--gpu", "measured"], ["kernels"]):
            assert run([*command, *words, "--weights", each]) == 0
            out = capsys.readouterr().out
            result = json.loads(out.splitlines()[-1])
            assert result["environment"]["weights"] == each
            assert f"weights {each}" in out.splitlines()[0]
            named[each, command[0]] = result
    for command in ("roofline", "kernels"):
        a, b = (named[each, command]["measured"] for each in ("bf16", weights))
        assert a
        assert b
        assert not set(a) & set(b)
    predicted = [min(named[each, "roofline"]["predicted"].values()) for each in ("bf16", weights)]
    assert predicted[1] < 0.75 * predicted[0]


def test_on_a_gpu_each_kernel_stands_beside_what_it_replaces(pretended_gpu, capsys):
    assert run(["kernels", "--model", "random:llama-2-7b", "--batch", "1"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("| norm_gate_up"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == ["32", "180.4", "39.12", "10.00"]
    assert cells[8:12] == ["40", "0", "norm 2 + gate + up + SiLU · up", "40.00"]
    assert json.loads(out.splitlines()[-1])["measured"]["b1 fused norm_gate_up us"] == [10.0] * 64
