"""`bench latency` on a tiny checkpoint: the table, the JSON, the flags, the exit codes."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import latency, report
from bench.__main__ import run
from bench.ceiling import Ceiling
from bench.contenders import TransformersRun
from bench.output import json_text, markdown
from bench.timing import Cell, Pass, Shape
from runtime.engine import Engine
from runtime.errors import ConfigError, DeviceError, OutOfMemoryError, RequestError
from tests.checkpoints import tiny, tok_b

QUICK = ("--prompt-len", 16, "--gen-len", 6, "--reps", 2)


def test_the_table_has_llama_benchs_rows_and_says_the_ceiling_first(bench, folders):
    printed = bench("latency", "--model", folders["llama"], *QUICK, "--batch", "1,2", "--depth", "0,32")
    assert printed.code == 0
    out = printed.out
    assert out.index("read ceiling") < out.index("floor of batch 2 @ d32") < out.index("| model")
    assert "tok/s" in out
    for test in ("pp16 @ d0", "tg6 @ d0", "pp16+tg6 @ d0", "pp16 @ d32", "tg6 @ d32"):
        assert f"| {test} " in out
    assert "linear interpolation" in out
    assert "warm-up, full length, not counted: 1" in out
    assert "random K and V on the device in place of prefilling" in out
    assert "fewer than 100 samples" in out
    assert "(end to end - first token) / (n - 1)" in out
    assert "failed passes: 0" in out


def test_the_json_holds_environment_flags_and_raw_samples(bench, folders):
    printed = bench("latency", "--model", folders["qwen2"], *QUICK, "--batch", "2", "-o", "json")
    assert printed.out.count("\n") == 1
    result = printed.result
    environment = result["environment"]
    assert environment["torch"] == torch.__version__
    assert {"gpu", "driver", "triton", "transformers", "python", "commit", "clocks_mhz"} <= set(environment)
    assert environment["model"] == str(folders["qwen2"])
    assert environment["dtype"] == "bfloat16"
    assert environment["flags"]["batch"] == [2]
    (cell,) = result["cells"]
    assert (cell["ops"], cell["graph"], cell["batch"], cell["depth"]) == ("unfused", "off", 2, 0)
    assert len(cell["raw"]["itl_ms"]) == cell["passes"] == 2
    assert [len(each) for each in cell["raw"]["ttft_ms"]] == [2, 2]
    assert cell["n_itl_ms"] == sum(map(len, cell["raw"]["itl_ms"]))
    assert {"mean_tpot_ms", "median_tpot_ms", "p99_itl_ms", "mean_ttft_ms", "floor_ms", "share_of_read_ceiling"} <= set(cell)
    assert cell["step_bytes"] == cell["step_weight_bytes"] + cell["step_kv_bytes"]


def test_csv_and_json_lines_hold_a_line_for_each_cell(bench, folders, tmp_path):
    words = ("latency", "--model", folders["llama"], *QUICK, "--batch", "1,2")
    lines = bench(*words, "-o", "csv", "--output", tmp_path / "r.csv").out.splitlines()
    table = list(csv.DictReader(io.StringIO("\n".join(lines[:-1]))))
    assert [row["batch"] for row in table] == ["1", "2"]
    assert (tmp_path / "r.csv").read_text().splitlines() == lines[:-1]
    printed = bench(*words, "-o", "jsonl", "--output", tmp_path / "r.jsonl")
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row.get("batch") for row in rows] == [1, 2, None]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("format", ["md", "json"])
def test_the_report_goes_to_a_file_too(bench, folders, tmp_path, format):
    printed = bench("latency", "--model", folders["llama"], *QUICK, "-o", format, "--output", tmp_path / "report")
    text = (tmp_path / "report").read_text()
    if format == "json":
        assert text == printed.out
    else:
        assert text.startswith("## bench latency: llama")
        assert printed.out.startswith(text)


def test_a_picture_and_a_page_are_written_where_asked(bench, folders, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    words = ("--plot", tmp_path / "p.png", "--html", tmp_path / "p.html")
    printed = bench("latency", "--model", folders["llama"], *QUICK, *words)
    assert printed.code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "p.html").read_text()
    assert "data:image/png;base64," in page
    assert "<td>tg6 @ d0</td>" in page


def test_formats_stand_side_by_side_and_take_turns(bench, tmp_path):
    folder = tok_b(tiny(tmp_path / "model", hidden_size=128, intermediate_size=256))
    words = ("latency", "--model", folder, *QUICK, "--batch", "1,2", "--weights", "bf16,fp8,int4")
    printed = bench(*words, "--html", tmp_path / "p.html", "--output", tmp_path / "a.md")
    assert printed.code == 0
    assert "weights bf16, fp8, int4" in printed.out.splitlines()[0]
    assert "one model for each format of the weights, all held at once" in printed.out
    cells = printed.result["cells"]
    assert [(cell["batch"], cell["weights"]) for cell in cells] == [(b, w) for b in (1, 2) for w in ("bf16", "fp8", "int4")]
    dense, fp8, int4 = (cell["step_weight_bytes"] for cell in cells[:3])
    assert int4 < fp8 < dense
    assert cells[0]["floor_ms"] > cells[1]["floor_ms"] > cells[2]["floor_ms"]
    reps = [line.split(":")[0] for line in printed.err.splitlines() if line.startswith("rep 1/2") and "batch 1" in line]
    assert [name.split("off")[1].split()[0] for name in reps] == ["batch", "fp8", "int4"]
    assert {row["over"] for row in printed.result["ratios"]} == {"unfused/off batch 1 depth 0", "unfused/off batch 2 depth 0"}
    assert {"weights, int4", "kv_cache beside int4"} <= set(printed.result["memory_bytes"])
    assert set(printed.result["load_seconds"]) == {"bf16", "fp8", "int4"}
    assert "<td>int4</td>" in (tmp_path / "p.html").read_text()
    (tmp_path / "a.json").write_text(printed.out.splitlines()[-1])
    (tmp_path / "b.json").write_text(bench(*words[:-1], "int4").out.splitlines()[-1])
    assert run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--threshold", "10000", "-o", "json"]) == 0


def test_a_format_that_does_not_fit_beside_the_others_is_one_sentence(bench, folders, monkeypatch):
    def full(*words):
        raise OutOfMemoryError("the model does not fit")

    monkeypatch.setattr(latency, "load", full)
    with pytest.raises(OutOfMemoryError, match=r"weights fp8 are held at once: the model .*; or give one format a run"):
        bench("latency", "--model", folders["llama"], *QUICK, "--weights", "fp8,bf16")


def test_formats_that_do_not_fit_together_are_told_before_any_is_made(bench, folders, monkeypatch):
    """The last of three was refused when the other two had been made."""
    monkeypatch.setattr(latency, "load", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(latency, "free_bytes", lambda device: 1_000_000)
    with pytest.raises(OutOfMemoryError, match=r"weights bf16, fp8 are held at once: they need .* GB, and 0.00 GB are free"):
        bench("latency", "--model", folders["llama"], *QUICK, "--weights", "bf16,fp8")


def test_a_picture_that_is_no_png_is_refused_before_anything_is_measured(bench, tmp_path):
    with pytest.raises(ConfigError, match=r"the picture is a PNG; give a name that ends in \.png"):
        bench("latency", "--model", tmp_path / "nothing here", "--plot", tmp_path / "p.svg")


def test_long_contexts_are_played_by_one_stream_alone(bench, folders):
    """Slots for all rows at the longest context would not fit: an engine of one slot plays those, over the same weights."""
    words = ("latency", "--model", folders["llama"], *QUICK, "--batch", "1,2", "--alone", "0,64,128", "-o", "json")
    cells = bench(*words).result["cells"]
    assert [(cell["batch"], cell["depth"]) for cell in cells] == [(1, 0), (2, 0), (1, 64), (1, 128)]
    assert all(cell["passes"] == 2 for cell in cells)


def test_a_cpu_is_told_what_it_cannot_measure(bench, folders):
    printed = bench("latency", "--model", folders["llama"], *QUICK)
    assert "busy times, boundaries and start costs need a CUDA device" in printed.out
    assert "start costs: not measured" in printed.out
    memory, cell = printed.result["memory_bytes"], printed.result["cells"][0]
    assert memory["weights, bf16"] == 2 * printed.result["parameters"]
    assert memory["kv_cache beside bf16"] > 0
    assert (memory["graph_pool"], memory["device_in_use"]) == (None, None)
    assert cell["boundary_us"] is None
    low, high = cell["p50_itl_ms_interval"]
    assert low <= cell["p50_itl_ms"] <= high


def test_transformers_plays_the_same_cells_in_turn(bench, folders):
    words = ("latency", "--model", folders["mistral"], *QUICK, "--batch", "2", "--depth", "8")
    printed = bench(*words, "--against", "transformers")
    ours, theirs = printed.result["cells"]
    assert (ours["ops"], theirs["ops"]) == ("unfused", "transformers")
    assert ours["step_bytes"] == theirs["step_bytes"]
    assert [len(gaps) for gaps in theirs["raw"]["itl_ms"]] == [5, 5]
    reps = [line.split(":")[0] for line in printed.err.splitlines() if line.startswith("rep ")]
    assert reps == [f"rep {i}/2, {ops}/off batch 2 depth 8" for i in (1, 2) for ops in ("unfused", "transformers")]


def test_a_rival_that_does_not_compile_leaves_the_others_their_cells(bench, folders, monkeypatch):
    inner = TransformersRun.__init__

    def broken(self, hf, compiled=False):
        inner(self, hf)
        self._forward = lambda **arguments: torch.ones(1) @ torch.ones(2)

    monkeypatch.setattr(TransformersRun, "__init__", broken)
    printed = bench("latency", "--model", folders["llama"], *QUICK, "--against", "transformers")
    ours, theirs = printed.result["cells"]
    assert (printed.code, ours["passes"], theirs["passes"]) == (1, 2, 0)
    assert "transformers failed: inconsistent tensor size" in theirs["failures"][0]


def test_random_weights_lift_the_limit_of_positions(bench, folders):
    words = ("latency", "--model", folders["llama"], "--prompt-len", 600, "--gen-len", 4, "--reps", 1)
    with pytest.raises(ConfigError, match="604 positions are needed and llama has 512"):
        bench(*words)
    printed = bench(*words, "--random-weights")
    assert printed.code == 0
    assert "random weights, seed 0" in printed.out


def test_a_failed_pass_is_counted_apart_and_is_exit_code_1(bench, folders, monkeypatch):
    step, calls = Engine.step, []

    def fails_once(self):
        calls.append(1)
        if len(calls) == 3:
            raise RequestError("logits are not finite")
        return step(self)

    monkeypatch.setattr(Engine, "step", fails_once)
    printed = bench("latency", "--model", folders["llama"], *QUICK, "--warmup", 0)
    assert printed.code == 1
    assert printed.result["failures"] == 1
    assert printed.result["cells"][0]["passes"] == 1
    assert "failed passes: 1" in printed.out


def test_a_cell_without_a_single_pass_is_still_a_row():
    cell = Cell(None, Shape(1, 16, 6, 0), 100, 80)
    cell.contender = type("Named", (), {"ops": "unfused", "graph": "off"})
    cell.failures.append("rep 1/1: out of memory")
    result = report.cell_json(cell, None, Ceiling(10.0, "given", None))
    assert result["mean_tpot_ms"] is None
    assert "failed" in markdown(report.rows("m", [result]))
    assert json.loads(json_text(result))["share_of_read_ceiling"] is None


def test_a_share_is_the_floor_over_the_mean_time_of_a_token():
    cell = Cell(type("Named", (), {"ops": "unfused", "graph": "off"}), Shape(1, 16, 3, 0), 20_000_000, 16_000_000)
    cell.passes.append(Pass(cell.shape, (0.5,), (0.003, 0.005), 2, 3, 0.508))
    result = report.cell_json(cell, None, Ceiling(10.0, "given", 20.0))
    assert result["floor_ms"] == pytest.approx(2.0)
    assert result["mean_tpot_ms"] == pytest.approx(4.0)
    assert result["share_of_read_ceiling"] == pytest.approx(0.5)
    assert result["share_of_datasheet"] == pytest.approx(0.25)
    assert result["read_gbps"] == pytest.approx(5.0)
    assert result["mean_end_to_end_tok_s"] == pytest.approx(3 / 0.508)


def test_an_error_of_the_devices_anywhere_is_one_sentence(bench, monkeypatch):
    def dead(*words):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand advice")

    monkeypatch.setattr("bench.launches.run", dead)
    with pytest.raises(DeviceError, match=r"^the device failed .*: CUDA error: unspecified launch failure; run the .*$"):
        bench("launches")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("unknown",),
        ("latency", "--batch", "0"),
        ("latency", "--batch", "17"),
        ("latency", "--batch", "1,x"),
        ("latency", "--gen-len", "2"),
        ("latency", "--reps", "0"),
        ("latency", "--ops", "fast"),
        ("latency", "--graph", "maybe"),
        ("latency", "--against", "vllm"),
        ("check", "--rows", "17"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as error:
        run(words)
    assert error.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "4", "--max-slots", "2"), "--max-slots is 2 and 4 rows"),
        (("--max-len", "20"), "22 positions are needed and max_len is 20"),
        (("--output", "no/such/folder/x.md"), "folder does not exist"),
        (("--profile", "no/such/folder/x.json"), "folder does not exist"),
        (("--profile", "trace.json", "--no-counts"), "--no-counts leaves the profiler out"),
        (("--plot", "no/such/folder/x.png"), "folder does not exist"),
        (("--html", "no/such/folder/x.html"), "folder does not exist"),
        (("--ladder",), "--ladder measures kernels, graphs .* needs a CUDA device"),
        (("--start",), "--start measures kernels, graphs .* needs a CUDA device"),
        (("--ops", "fused"), "fused kernels run only on a CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(bench, folders, words, message):
    with pytest.raises(ConfigError, match=message):
        bench("latency", "--model", folders["llama"], *QUICK, *words)


def test_the_door_ends_with_a_sentence_and_exit_code_1():
    words = [sys.executable, "-m", "bench", "latency", "--model", "no-such/model-folder/here"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=280)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
