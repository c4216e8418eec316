"""Statistics of samples: percentiles, and what is said of few of them."""

import numpy as np
import pytest

from bench.samples import mean_and_deviation, median_interval, percentile, ratio_interval, summary

SAMPLES = [10, 11, 12, 13, 14, 15, 16, 17, 18, 100]


@pytest.mark.parametrize(("q", "value"), [(0, 10), (50, 14.5), (90, 26.2), (99, 92.62), (100, 100)])
def test_percentiles_interpolate_linearly(q, value):
    assert percentile(list(reversed(SAMPLES)), q) == pytest.approx(value)
    assert np.percentile(SAMPLES, q) == pytest.approx(value)


def test_one_sample_is_every_percentile_and_has_no_deviation():
    assert percentile([3.0], 99) == 3.0
    assert mean_and_deviation("x", [3.0]) == {"mean_x": 3.0, "std_x": None}


def test_a_p99_of_few_samples_is_flagged_and_n_is_told():
    few = summary("itl_ms", SAMPLES)
    assert few["n_itl_ms"] == 10
    assert few["p99_itl_ms_has_few_samples"] is True
    assert few["p99_itl_ms"] == pytest.approx(92.62)
    assert summary("itl_ms", SAMPLES * 10)["p99_itl_ms_has_few_samples"] is False


def test_no_samples_give_no_figures():
    empty = summary("itl_ms", [])
    assert empty["mean_itl_ms"] is None
    assert empty["n_itl_ms"] == 0


def test_an_interval_holds_the_ratio_and_narrows_with_less_noise():
    drawn = np.random.default_rng(1)

    def reps(scale, noise):
        return [list(scale * (1 + noise * drawn.standard_normal(50))) for _ in range(5)]

    wide = ratio_interval(reps(3.0, 0.05), reps(6.0, 0.05), paired=False)
    narrow = ratio_interval(reps(3.0, 0.005), reps(6.0, 0.005), paired=False)
    assert wide[0] < 2.0 < wide[1]
    assert narrow[0] < 2.0 < narrow[1]
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3


def test_a_drift_shared_by_reps_in_turns_leaves_their_ratio():
    ours = [[1.0 + 0.2 * i] * 9 for i in range(5)]
    theirs = [[2 * each for each in rep] for rep in ours]
    assert ratio_interval(ours, theirs, paired=True) == pytest.approx((2.0, 2.0))
    low, high = ratio_interval(ours, theirs, paired=False)
    assert low < 1.8
    assert high > 2.2


def test_one_rep_has_no_interval():
    assert median_interval([[1.0, 2.0]]) is None
    assert ratio_interval([[1.0]], [[1.0], [2.0]], paired=False) is None
