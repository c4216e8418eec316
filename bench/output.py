"""Owns how every command's result is written: Markdown, CSV, JSON lines, JSON, one self-contained HTML file, a picture.

Does not own what a result holds. The last line on stdout is one JSON object; with `-o json` it is all there is.
"""

import base64
import csv
import importlib.util
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment

from runtime.errors import ConfigError

Row = Mapping[str, Any]

PAGE = """<!doctype html><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left } img { max-width: 100% } pre { overflow-x: auto }
</style>
<h1>{{ title }}</h1><ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% for caption, picture in pictures %}<figure><img alt="{{ caption }}" src="data:image/png;base64,{{ picture }}">
<figcaption>{{ caption }}</figcaption></figure>{% endfor %}
{% for name, head, rows in tables %}<h2>{{ name }}</h2><table><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>{% endfor %}
<ul>{% for note in footnotes %}<li>{{ note }}</li>{% endfor %}</ul>
<details><summary>Environment</summary><pre>{{ environment }}</pre></details>
"""


BARS = {
    "floor": ("#2b6cb0", "floor: bytes / read ceiling"),
    "kernels": ("#63b3ed", "kernels beyond the floor"),
    "gaps": ("#f6ad55", "gaps between kernels"),
    "host": ("#e53e3e", "waiting for the host"),
}
"""The parts of a token's time: colour and label."""


@dataclass
class Report:
    """What a command has to say.

    Attributes:
        result: the JSON object; `environment` is one of its keys, and `measured`, where there is one, holds the raw samples of
            each timed thing by name (lower is better), which `bench compare` reads.
        tables: rows by the table's heading; values are words or numbers.
        records: lines of CSV and JSONL; None: the tables' rows.
        pictures: PNG files by caption.
    """

    result: dict[str, Any]
    tables: dict[str, Sequence[Row]] = field(default_factory=dict)
    footnotes: Sequence[str] = ()
    records: Sequence[Row] | None = None
    pictures: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Output:
    """Where a command's words go: `begin` before anything is measured, `say` meanwhile, `end` with the report."""

    format: Literal["md", "json", "jsonl", "csv"] = "md"
    file: Path | None = None
    html: Path | None = None
    _title: str = ""
    _notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_folder(self.file, "--output")
        require_folder(self.html, "--html")

    def begin(self, title: str, notes: Sequence[str]) -> None:
        self._title, self._notes = title, notes
        self._tell(self._heading())

    def _tell(self, words: str) -> None:
        print(words, file=sys.stdout if self.format == "md" else sys.stderr, flush=True)

    def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def show(self, name: str, rows: Sequence[Row]) -> None:
        """A table before the report, where one is meant to be read while something runs."""
        self._tell(f"### {name}\n\n{markdown(rows)}\n")

    def end(self, report: Report) -> None:
        """Print the report, then write it where it was asked for.

        Raises:
            ConfigError: a file cannot be written.
        """
        body = text(self.format, report)
        if self.format != "json":
            print(body)
        print(json_text(report.result), flush=True)
        whole = f"{self._heading()}\n{body}\n" if self.format == "md" else f"{body}\n"
        for path, words in ((self.file, whole), (self.html, page(self._title, self._notes, report) if self.html else "")):
            try:
                if path is not None:
                    path.write_text(words, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}; the result is what was printed") from None

    def _heading(self) -> str:
        return "\n- ".join([f"## {self._title}\n", *self._notes]) + "\n"


def require_folder(path: Path | None, flag: str) -> None:
    """Raises ConfigError if a file to be written has no folder to lie in: it should be told before hours of work, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder does not exist; make it first")
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; give a file's name")


def text(format: str, report: Report) -> str:
    """A report as "md", "csv", "jsonl" or "json"."""
    if format == "json":
        return json_text(report.result)
    if format == "md":
        tables = [f"### {name}\n\n{markdown(rows)}" for name, rows in report.tables.items() if rows]
        return "\n\n".join([*tables, "\n".join(f"- {note}" for note in report.footnotes)])
    records = report.records
    if records is None:
        records = [{"table": name, **row} for name, rows in report.tables.items() for row in rows]
    return csv_text(records) if format == "csv" else "\n".join(json_text(record) for record in records)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table of at least one row, columns padded so that it reads in a terminal too."""
    head, cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [head, ["-" * width for width in widths], *cells]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def csv_text(records: Sequence[Row]) -> str:
    """A line for each record: every figure that is a plain value."""
    plain = [{key: value for key, value in record.items() if not isinstance(value, dict | list | tuple)} for record in records]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(dict.fromkeys(key for record in plain for key in record)))
    writer.writeheader()
    writer.writerows(plain)
    return out.getvalue().rstrip()


def json_text(value: Any) -> str:
    """Strict JSON on one line; paths are told as text."""
    return json.dumps(value, allow_nan=False, default=str)


def page(title: str, notes: Sequence[str], report: Report) -> str:
    """The report as one HTML file that needs no other."""
    return (
        Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=title,
            notes=notes,
            pictures=[(caption, base64.b64encode(png).decode()) for caption, png in report.pictures.items()],
            tables=[(name, *_cells(rows)) for name, rows in report.tables.items() if rows],
            footnotes=report.footnotes,
            environment=json.dumps(report.result.get("environment"), indent=1, default=str),
        )
    )


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if not has_matplotlib():
        raise ConfigError('--plot needs matplotlib, which is not installed; `pip install "quartet[plots]"`')


def token_time(title: str, bars: Sequence[dict[str, Any]]) -> bytes:
    """A PNG of stacked bars; each has a `name` and, in ms, the parts of BARS."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.55 * len(bars)), dpi=150, layout="constrained")
    axes = figure.subplots()
    names, left = [bar["name"] for bar in bars], [0.0] * len(bars)
    for part, (colour, label) in BARS.items():
        widths = [bar[part] for bar in bars]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.2f} ms", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(left, default=1.0) * 1.12)
    axes.set_xlabel("ms a token")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=4, loc="outside lower center")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def number(value: Any) -> str:
    """A table's cell: words as they are, integers in full, other numbers to four figures, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        digits = 3 - math.floor(math.log10(abs(value))) if value else 0
        return f"{value:,.{min(max(digits, 0), 6)}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    head = list(dict.fromkeys(key for row in rows for key in row))
    return head, [[number(row.get(key)) for key in head] for row in rows]
