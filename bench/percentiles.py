"""Owns what is said of a list of samples: mean, deviation, percentiles. Does not own where the samples come from."""

import statistics
from collections.abc import Sequence

METHOD = "linear interpolation between the two nearest ranks"
P99_NEEDS = 100
"""With fewer samples than this a p99 is nearly the maximum, and is flagged."""


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of at least one sample, by linear interpolation, as numpy's default does."""
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def deviation(samples: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for a single sample, which has none."""
    return statistics.stdev(samples) if len(samples) > 1 else None


def mean_and_deviation(name: str, samples: Sequence[float]) -> dict[str, float | None]:
    """mean_ and std_ of `name`, for JSON; both None without samples."""
    return {f"mean_{name}": statistics.fmean(samples) if samples else None, f"std_{name}": deviation(samples)}


def summary(name: str, samples: Sequence[float]) -> dict[str, float | int | bool | None]:
    """mean_, std_, median_, p50_ (the same), p90_, p99_, max_ and n_ of `name`, for JSON; None without samples."""
    some = bool(samples)
    return {
        **mean_and_deviation(name, samples),
        f"median_{name}": percentile(samples, 50) if some else None,
        f"p50_{name}": percentile(samples, 50) if some else None,
        f"p90_{name}": percentile(samples, 90) if some else None,
        f"p99_{name}": percentile(samples, 99) if some else None,
        f"max_{name}": max(samples) if some else None,
        f"n_{name}": len(samples),
        f"p99_{name}_has_few_samples": len(samples) < P99_NEEDS,
    }
