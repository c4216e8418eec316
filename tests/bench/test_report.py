"""What is said of samples: percentiles, and what is said of few of them."""

import numpy as np
import pytest

from bench.report import mean_and_deviation, percentile, summary

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
