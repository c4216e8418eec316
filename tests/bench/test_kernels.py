"""`bench kernels` and its tuner: the table, the search over tiles on a made-up clock, the file it leaves."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from bench import kernels, tune
from bench.arithmetic import in_order, step_launches
from bench.ceiling import Ceiling
from bench.steps import Resources
from models.random_weights import SHAPES
from runtime.errors import ConfigError, DeviceError
from runtime.ops import configs
from runtime.ops.attention import AttentionTile
from runtime.ops.tuned import TileKey, load_tuned, save_tuned

CONFIG = SHAPES["llama-2-7b"]
CEILING = Ceiling(4000.0, "given", 4800.0)


@dataclass(frozen=True)
class Tile:
    rows: int
    k_slice: int
    warps: int
    stages: int
    early: bool = True


def test_a_cpu_gets_bytes_and_floors(bench):
    printed = bench("kernels", "--model", "random:llama-2-7b", "--batch", "1,8")
    assert printed.code == 0
    assert "no kernel can be timed here" in printed.out
    assert "4,433.0 GB/s (on record, not of this machine: one NVIDIA H200" in printed.out
    assert printed.result["ceiling"]["measured_gbps"] == 4433.0
    assert "Kernels of a fused step, batch 8" in printed.out
    assert "norm 2 + gate + up + SiLU · up" in printed.out
    assert printed.result["measured"] == {}


def test_tuning_on_a_cpu_is_refused_in_one_sentence(bench):
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        bench("kernels", "--model", "random:llama-2-7b", "--tune")


def test_a_row_holds_the_launch_and_what_it_replaces():
    sets = {ops: step_launches(CONFIG, "bfloat16", 1, 512, ops) for ops in ("fused", "unfused")}
    times = {ops: {each.name: [9.0, 10.0, 50.0] for each in launches} for ops, launches in sets.items()}
    resources = [Resources(i, 0) for i in range(len(in_order(sets["fused"])))]
    rows = {row["kernel"]: row for row in kernels.table(sets, times, resources, CEILING)}
    output = rows["proj_residual"]
    assert (output["us"], output["their us"], output["replaces"]) == (10.0, 20.0, "output + add")
    assert output["MB"] == pytest.approx(33.554432)
    assert output["floor us"] == pytest.approx(33.554432 / 4)
    assert output["GB/s"] == pytest.approx(3355.4432)
    assert output["of ceiling"] == "83.9%"
    assert output["registers"] == 3  # embedding, qkv, attention, output
    assert rows["norm_lm_head"]["registers"] == 161


KEY = TileKey("norm_linear", "single", 64, 64, 2)


class Clock:
    """Steps whose time depends on the tiles alone: 3 ms, and less the nearer rows are to 8 and warps to 2."""

    batch, device = 1, torch.device("cuda")

    def __init__(self):
        self.graphs = 0

    def reset(self):
        pass

    def graph(self, ops):
        self.graphs += 1
        tile = ops["tiles"][KEY]
        if tile.k_slice < 64:
            raise RuntimeError("out of resource: shared memory")
        scale = 1.0 if tile.early else 3.0  # a wrong tile: other logits, and the shortest time
        self.ms_now = (1.0 if scale != 1.0 else 3.0) + abs(tile.rows - 8) / 10 + abs(tile.warps - 2) / 10
        now = self.ms_now
        return SimpleNamespace(logits=torch.full((4,), scale), ms=now)

    def ms(self, play):
        return [play.ms] * 3


def test_the_tuner_goes_down_to_the_best_tile_and_passes_over_wrong_ones(monkeypatch):
    monkeypatch.setattr(tune.Found, "ops", lambda self, pdl: {"tiles": self.tiles})
    monkeypatch.setattr(tune, "_logits", lambda steps, play: play.logits)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    said = []
    found = tune.Found({KEY: Tile(2, 64, 8, 1)})
    tune.tune(found, Clock(), True, 60, said.append)
    assert found.tiles[KEY] == Tile(8, 64, 2, 1)
    assert found.start_ms == pytest.approx(4.2)
    assert found.ms == pytest.approx(3.0)
    assert any("other logits" in line for line in said)
    assert any("refused: out of resource" in line for line in said)


def test_a_dead_device_ends_the_tuner_in_one_sentence(monkeypatch):
    """Every further tile would be refused with the same words, for as long as the tuner has time."""
    monkeypatch.setattr(tune.Found, "ops", lambda self, pdl: {"tiles": self.tiles})
    monkeypatch.setattr(tune, "_logits", lambda steps, play: play.logits)

    def dead(device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    found = tune.Found({KEY: Tile(2, 64, 8, 1)})
    with pytest.raises(DeviceError, match=r"^the device failed and nothing further can run .*out of resource.*again$"):
        tune.tune(found, Clock(), True, 60, print)


def test_the_tuner_stops_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(tune.Found, "ops", lambda self, pdl: {"tiles": self.tiles})
    monkeypatch.setattr(tune, "_logits", lambda steps, play: play.logits)
    clock, said = Clock(), []
    tune.tune(tune.Found({KEY: Tile(2, 64, 8, 1)}), clock, True, 0, said.append)
    assert clock.graphs == 1
    assert "time is over" in said[-1]


def test_neighbours_stay_within_what_the_kernels_allow():
    found = list(tune.neighbours(Tile(16, 64, 4, 1), TileKey.of("norm_linear", 8, 32, 64, 2)))
    assert Tile(32, 64, 4, 1) in found
    assert Tile(16, 64, 4, 1, early=False) in found
    assert all(tile.rows in (16, 32) and 16 <= tile.k_slice <= 64 and tile.stages >= 1 for tile in found)


@pytest.mark.parametrize(
    ("kernel", "batch", "lm_head", "moved"),
    [
        ("norm_linear", 1, False, {"ahead", "registers"}),
        ("norm_linear", 8, True, {"stages"}),
        ("norm_linear", 8, False, {"stages", "splits"}),
        ("norm_gate_up", 8, False, {"stages"}),
        ("proj_residual", 8, False, {"stages", "splits"}),
    ],
)
def test_what_a_kernel_does_not_use_is_not_tried(kernel, batch, lm_head, moved):
    single, width = batch == 1, 2048
    tile = configs.Tile(32, 1024, 8, 1, registers=128) if single else configs.Tile(32, 64, 4, 2)
    found = {
        name
        for each in tune.neighbours(tile, TileKey.of(kernel, batch, 64, width if single else 256, 2), lm_head)
        for name in vars(tile)
        if vars(each)[name] != vars(tile)[name]
    }
    assert found == {"rows", "k_slice", "warps"} | moved


def test_tiles_found_are_read_back_beside_those_of_other_gpus(tmp_path):
    path, key = tmp_path / "tiles.json", TileKey("norm_linear", "single", 12288, 4096, 2)
    assert load_tuned("NVIDIA H200", path) == {}
    tile, wide = configs.Tile(8, 1024, 4, 1), configs.Tile(8, 256, 4, 1)
    save_tuned("NVIDIA H200", {key: tile}, path)
    save_tuned("NVIDIA L4", {key: wide}, path)
    save_tuned("NVIDIA H200", {TileKey("attention", "batch", 4096, 4096, 2): AttentionTile(64, 64, 4)}, path)
    assert load_tuned("NVIDIA H200", path) == {
        key: tile,
        TileKey("attention", "batch", 4096, 4096, 2): AttentionTile(64, 64, 4),
    }
    assert load_tuned("NVIDIA L4", path) == {key: wide}


def test_a_batchs_splits_all_keep_a_slice_and_fp8_slices_stay_within_512():
    """A block without a slice waits for no kernel: the tuner would find it right by chance."""
    key = TileKey.of("proj_residual", 8, 4096, 11008, 1)
    assert configs.Tile(128, 512, 8, 3, 4) in tune.neighbours(configs.Tile(128, 256, 8, 3, 4), key)
    assert configs.Tile(128, 512, 8, 3, 8) not in tune.neighbours(configs.Tile(128, 256, 8, 3, 8), key)
    assert configs.Tile(64, 1024, 8, 3) not in tune.neighbours(configs.Tile(64, 512, 8, 3), key)


def one_tile(name="proj_residual/batch/4096/11008/1", **fields):
    fields = {"rows": 64, "k_slice": 512, "warps": 4, "stages": 3, "splits": 1, "ahead": 2} | fields
    return json.dumps({"G": {name: fields}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[1]", "3", '{"G": 3}', '{"G": {"a/b": {}}}'),
        *(json.dumps({"G": {"a/b/1/2/2": 3}}), json.dumps({"G": {"a/b/1/2": {}}}), one_tile(held=1)),
        *(one_tile(rows=8192), one_tile(k_slice=96), one_tile(k_slice=1024), one_tile(k_slice="512"), one_tile(warps=0)),
        *(one_tile(splits=8), one_tile(splits=0), one_tile("norm_linear/single/4096/64/2", k_slice=128)),
        one_tile("norm_linear/single/4096/4096/4", splits=2),
    ],
)
def test_a_damaged_file_of_tiles_is_told_passed_over_and_mended_by_the_next_run(tmp_path, caplog, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    assert load_tuned("G", path) == {}
    assert "cannot be read" in caplog.text
    found = {TileKey("norm_linear", "single", 12288, 4096, 2): configs.Tile(8, 1024, 4, 1)}
    save_tuned("G", found, path)
    assert load_tuned("G", path) == found


WIDTHS = (32, 48, 64, 100, 128, 192, 200, 576, 896, 1536, 2176, 3584, 4864, 11008, 13824, 14336, 18944)


@pytest.mark.parametrize("kernel", ["norm_linear", "proj_residual", "norm_gate_up"])
@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_the_tile_of_any_shape_is_one_for_it(kernel, batch, itemsize):
    for width in WIDTHS:
        for n in (*WIDTHS, 17, 49152, 152064):
            for blocks in {False, itemsize == 1 and width % 128 == 0}:
                tile = configs.tile_for(kernel, n, width, batch, itemsize, blocks)
                assert configs.fits(tile, kernel, n, width, batch == 1, itemsize), (n, width, tile)


@pytest.mark.parametrize("kernel", ["norm_linear", "proj_residual", "norm_gate_up"])
@pytest.mark.parametrize(("group", "zeros"), [(128, False), (128, True), (64, False), (32, True)])
def test_one_rows_tile_of_4_bits_gives_each_warp_rows_of_one_tile_of_weights_and_some_of_its_in_features(kernel, group, zeros):
    own, pair = configs.piece(0.5), 1 if kernel == "norm_gate_up" else 2
    for width in (width for width in WIDTHS if width % group == 0):
        for n in (16, 40, 576, 4864, 14336, 18944):
            tile = configs.int4_single_tile(kernel, n, width, group, zeros)
            assert tile.rows <= n
            assert tile.k_slice % own == tile.warps * own % tile.k_slice == 0
            assert tile.k_slice < 2 * max(width, own)
            rows_of_warp = tile.rows * tile.k_slice // (tile.warps * own)
            assert rows_of_warp in (pair, 2 * pair, 4 * pair)
            assert rows_of_warp <= 8
            assert n % rows_of_warp == 0
            assert tile.ahead > 0
