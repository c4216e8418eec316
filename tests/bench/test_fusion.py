"""`bench fusion`: the arithmetic of its experiments, and what a CPU is told."""

from dataclasses import replace

import pytest

from bench import experiments, fusion
from bench.arithmetic import H200

RATES = replace(H200, copy_gbps=1000.0, tflops=100.0, torch_us=10.0, triton_us=20.0)


def test_the_large_chain_moves_26_gigabytes_and_its_mask_or_8():
    eager, compiled, triton = experiments.chain(32 * 4096, 16384, "").variants
    mask = 32 * 4096 * 16384
    assert sum(moved for moved, _ in eager.kernels) == 6 * 2 * mask + mask
    assert [moved for moved, _ in compiled.kernels] == [moved for moved, _ in triton.kernels] == [8_589_934_592]


def test_a_prediction_is_the_slowest_of_bytes_arithmetic_and_launches():
    def make(device):
        raise AssertionError("nothing is allocated for a prediction")

    assert experiments.Variant("eager", [(50_000_000, 0), (0, 400_000_000)], make).predicted_us(RATES) == pytest.approx(54)
    assert experiments.Variant("eager", [(1, 0)] * 3, make).predicted_us(RATES) == pytest.approx(30)
    assert experiments.Variant("Triton", [(1, 0)], make).predicted_us(RATES) == pytest.approx(20)
    assert experiments.Variant("Triton", [(1, 0)], make, host=False).predicted_us(RATES) == pytest.approx(
        0.001 / 1000, abs=1e-3
    )


def test_rows_in_flight_that_do_not_fit_l2_are_read_from_hbm_twice():
    def us(width, rates):
        return experiments.rows(0, width).variants[-1].predicted_us(rates)

    within, beyond = (replace(RATES, sm_l2_bytes=4 * 131072 + spare) for spare in (0, -1))
    assert us(131072, beyond) == pytest.approx(1.5 * us(131072, within))
    assert us(16384, beyond) == us(131072, within)


def test_every_experiment_has_the_two_that_its_word_compares():
    everything = experiments.by_name()
    assert tuple(everything) == experiments.EXPERIMENTS
    for experiment in (each for group in everything.values() for each in group):
        assert set(experiment.gain) <= {variant.name for variant in experiment.variants}


def test_a_cpu_gets_the_arithmetic_and_is_told_so(bench):
    printed = bench("fusion", "--only", "chain,attention")
    assert printed.code == 0
    assert "no CUDA device: the arithmetic only" in printed.out
    assert "27,917" in printed.out
    assert "not measured: three passes over HBM, and a mask, become one" in printed.out
    assert printed.result["measured"] == {}


def test_a_variant_that_fails_is_told_in_its_row(monkeypatch):
    class Cuda:
        type = "cuda"

    def make(device):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(fusion.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(fusion.torch.cuda, "synchronize", lambda device: None)
    row, samples = fusion._row(experiments.Variant("torch.compile", [(8, 0)], make), RATES, Cuda())
    assert row["note"] == "failed: no such kernel"
    assert (row["us"], samples) == (None, None)
