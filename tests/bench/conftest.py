"""Tiny checkpoints of each family, made once, and the bench's door with what it printed."""

import json
from dataclasses import dataclass

import pytest

from bench.__main__ import run as run_bench
from tests.checkpoints import ARCHITECTURES, tiny, tok_b


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folder of each family."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: tok_b(tiny(root / family, family)) for family in ARCHITECTURES}


@dataclass
class Printed:
    """What a command left: exit code, stdout and stderr; `result` is the last line of stdout."""

    code: int
    out: str
    err: str

    @property
    def result(self):
        return json.loads(self.out.splitlines()[-1], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture
def bench(capsys, monkeypatch):
    """Run a subcommand of `python -m bench` in this process, on the CPU wherever the tests run.

    What makes figures worth telling and takes most of the time is less: bytes read for the ceiling, resamples of an interval,
    collections before a pass.
    """
    monkeypatch.setattr("bench.ceiling.CPU_BYTES", 1 << 26)
    monkeypatch.setattr("bench.samples.RESAMPLES", 50)
    monkeypatch.setattr("gc.collect", lambda *_: 0)

    def run(*words):
        capsys.readouterr()
        code = run_bench([*map(str, words), "--device", "cpu"])
        return Printed(code, *capsys.readouterr())

    return run
