"""What README and docs say of measurements is what bench/RESULTS.md and .ci/results hold."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, WHY, RESULTS = ((ROOT / page).read_text() for page in ("README.md", "docs/why-four-kernels.md", "bench/RESULTS.md"))
CELLS = [("fused", "on"), ("fused", "off"), ("unfused", "on"), ("unfused", "off")]


def _rows(page: str, start: str) -> list[list[str]]:
    """The cells of every row of a table that begins with `start`."""
    lines = [line.replace("**", "") for line in page.splitlines() if line.startswith(f"| {start} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _measured(model: str, ops: str, graph: str) -> list[str]:
    """ITL p50, p90, p99, tok/s, floor and floor / step at batch 1, of the newest run."""
    return next(row[4:] for row in _rows(RESULTS, model) if row[1:4] == [ops, graph, "1"])


@pytest.mark.parametrize("model", ["Llama-2-7B", "Llama-3.1-8B"])
def test_the_first_table_of_the_readme_is_the_newest_run(model):
    said = _rows(README, model)[0][1:]
    cells = [_measured(model, *cell) for cell in CELLS]
    p50 = [f"{float(cell[0]):.2f}" for cell in cells]
    assert said == [f"{p50[0]} ({float(cells[0][3]):.0f} tok/s)", *p50[1:], f"{float(cells[0][4]):.2f}"]


@pytest.mark.parametrize("cell", CELLS)
def test_the_table_of_why_four_kernels_is_the_newest_run(cell):
    p50, _, _, rate, _, share, *_ = _measured("Llama-2-7B", *cell)
    name = f"{cell[0]}, {'graph' if cell[1] == 'on' else 'eager'}"
    said = next(row for start in (name, f"{name}, PDL") for row in _rows(WHY, start) if len(row) == 5)
    assert said[1:4] == [p50, rate, share]


def test_every_measurement_that_a_page_names_is_one_of_ci_results():
    script = (ROOT / ".ci" / "results").read_text()
    known = set(re.findall(r"^    (\w+)\)", script, flags=re.MULTILINE))
    named = {name for line in re.findall(r"`\.ci/results OUT ([a-z ]+)`", README + RESULTS) for name in line.split()}
    assert named
    assert named <= known


def test_every_file_that_a_page_names_is_there():
    paths = re.findall(r"`((?:bench|docs|models|runtime|server|tests)/[\w./-]+)`|\]\(([\w./-]+\.png)\)", README)
    missing = [path for pair in paths for path in pair if path and not (ROOT / path).exists()]
    assert not missing
