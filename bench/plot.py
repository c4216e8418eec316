"""Owns the picture of a token's time: a bar for each cell, split into floor, kernels, gaps, host. Does not own the figures."""

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from runtime.errors import ConfigError

COLOURS = {"floor": "#2b6cb0", "kernels": "#63b3ed", "gaps": "#f6ad55", "host": "#e53e3e"}
WORDS = {
    "floor": "floor: bytes / read ceiling",
    "kernels": "kernels beyond the floor",
    "gaps": "gaps between kernels",
    "host": "waiting for the host",
}


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if not has_matplotlib():
        raise ConfigError('--plot needs matplotlib, which is not installed; `pip install "quartet[plots]"`')


def token_time(title: str, bars: Sequence[dict[str, Any]]) -> bytes:
    """A PNG of stacked bars; each has a `name` and, in ms, the parts of COLOURS."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.55 * len(bars)), dpi=150, layout="constrained")
    axes = figure.subplots()
    names, left = [bar["name"] for bar in bars], [0.0] * len(bars)
    for part, colour in COLOURS.items():
        widths = [bar[part] for bar in bars]
        axes.barh(names, widths, left=left, color=colour, label=WORDS[part])
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.2f} ms", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(left, default=1.0) * 1.12)
    axes.set_xlabel("ms a token")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.5 / (1 + len(bars))))
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
