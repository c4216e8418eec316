"""Owns what is said of raw samples: percentiles, means, bootstrap intervals of medians and ratios. Takes none itself."""

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

METHOD = "linear interpolation between the two nearest ranks"
P99_NEEDS = 100
"""With fewer samples than this a p99 is nearly the maximum, and is flagged."""
RESAMPLES = 1000
INTERVAL = "95 % bootstrap: reps drawn with replacement, then samples of each rep; reps of one run in pairs"

Reps = Sequence[Sequence[float]]
"""Samples of each rep; reps of two cells with one index were played one after the other."""


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of at least one sample, by linear interpolation."""
    return float(np.percentile(samples, q))


def mean_and_deviation(name: str, samples: Sequence[float]) -> dict[str, float | None]:
    """mean_ and std_ (sample deviation, n - 1) of `name`; None where there are too few samples."""
    return {
        f"mean_{name}": statistics.fmean(samples) if samples else None,
        f"std_{name}": statistics.stdev(samples) if len(samples) > 1 else None,
    }


def summary(name: str, samples: Sequence[float]) -> dict[str, float | int | bool | None]:
    """mean_, std_, median_, p50_ (the same), p90_, p99_, max_ and n_ of `name`; None without samples."""
    ranks = {"median": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {
        **mean_and_deviation(name, samples),
        **{f"{word}_{name}": percentile(samples, q) if samples else None for word, q in ranks.items()},
        f"n_{name}": len(samples),
        f"p99_{name}_has_few_samples": len(samples) < P99_NEEDS,
    }


def median_interval(reps: Reps) -> tuple[float, float] | None:
    """Bootstrap interval of the median of all samples; None with fewer than two reps."""
    if len(reps) < 2:
        return None
    drawn = np.random.default_rng(0)
    return _middle([_resampled_median(reps, drawn.integers(0, len(reps), len(reps)), drawn) for _ in range(RESAMPLES)])


def ratio_interval(ours: Reps, theirs: Reps, paired: bool) -> tuple[float, float] | None:
    """Bootstrap interval of median(theirs) / median(ours); None with fewer than two reps of either.

    Args:
        paired: the reps were played in turns, so a drifting clock is shared; False for two runs.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    drawn, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        count = min(len(ours), len(theirs)) if paired else len(ours)
        picked = drawn.integers(0, count, count)
        below = _resampled_median(ours, picked, drawn)
        other = picked if paired else drawn.integers(0, len(theirs), len(theirs))
        found.append(_resampled_median(theirs, other, drawn) / below)
    return _middle(found)


def _resampled_median(reps: Reps, picked: NDArray[np.int64], drawn: np.random.Generator) -> float:
    return float(np.median(np.concatenate([drawn.choice(reps[i], len(reps[i])) for i in picked])))


def _middle(found: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)
