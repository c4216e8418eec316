"""Formats: one report as Markdown, CSV, JSON lines, JSON, a page; and `bench launches`, the shortest command, through them."""

import csv
import io
import json

import pytest

from bench.output import Output, Report, markdown, number, page, text
from runtime.errors import ConfigError

REPORT = Report(
    {"bench": "x", "environment": {"gpu": None}},
    {"A": [{"name": "one", "us": 1234.5678}, {"name": "two", "MB": None}], "B": [{"name": "<b>", "n": 12345}], "none": []},
    ["said"],
    pictures={"bars": b"\x89PNG"},
)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, ""), ("x", "x"), (12345, "12,345"), (1234.5678, "1,235"), (3.28449, "3.284"), (0.00012345, "0.000123"), (0.0, "0")],
)
def test_numbers_have_four_figures(value, words):
    assert number(value) == words


def test_a_table_has_every_column_of_its_rows():
    lines = markdown(REPORT.tables["A"]).splitlines()
    assert lines[0] == "| name | us    | MB |"
    assert lines[3] == "| two  |       |    |"


def test_each_format_holds_every_row():
    assert "### A" in text("md", REPORT)
    assert "none" not in text("md", REPORT)
    rows = list(csv.DictReader(io.StringIO(text("csv", REPORT))))
    assert [(row["table"], row["name"]) for row in rows] == [("A", "one"), ("A", "two"), ("B", "<b>")]
    lines = [json.loads(line) for line in text("jsonl", REPORT).splitlines()]
    assert lines[0] == {"table": "A", "name": "one", "us": 1234.5678}
    assert json.loads(text("json", REPORT))["bench"] == "x"


def test_a_page_needs_no_other_file_and_escapes_what_it_shows():
    html = page("A run & more", ["noted"], REPORT)
    assert "A run &amp; more" in html
    assert "<td>&lt;b&gt;</td>" in html
    assert 'src="data:image/png;base64,iVBORw=="' in html
    assert "http" not in html.replace("http-equiv", "")


def test_a_folder_that_is_missing_is_told_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"--html .*folder does not exist"):
        Output(html=tmp_path / "no" / "x.html")
    with pytest.raises(ConfigError, match="is a folder"):
        Output(html=tmp_path)


def test_a_file_that_cannot_be_written_loses_no_result(tmp_path, capsys):
    """All was measured, and nothing was told but a traceback."""
    output = Output(html=tmp_path / "page.html")
    output.begin("title", [])
    (tmp_path / "page.html").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        output.end(Report({"bench": "x", "environment": {"flags": {"html": tmp_path}}}, {"T": [{"a": 1}]}, []))
    assert "| a |" in capsys.readouterr().out


def test_launches_of_a_cpu_are_those_of_torch(bench, tmp_path):
    printed = bench("launches", "--html", tmp_path / "x.html", "--output", tmp_path / "x.md")
    assert printed.code == 0
    assert "only the call of a torch op can be measured here" in printed.out
    assert len(printed.result["measured"]["torch op us"]) == 9
    assert printed.out.startswith((tmp_path / "x.md").read_text())
    assert "<td>torch op</td>" in (tmp_path / "x.html").read_text()
