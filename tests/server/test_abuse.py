"""Short forms of `make fuzz` and `make soak`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.server.abuse import fuzz, soak
from tests.server.serving import until

pytestmark = pytest.mark.usefixtures("alive")


def test_fuzzed_bodies_are_answered_or_refused(letters):
    seen = fuzz(letters.port, 500)
    assert seen[200] > 30
    assert seen[400] > 200


def test_what_the_document_allows_and_what_it_does_not_is_never_a_5xx(letters):
    url = f"http://127.0.0.1:{letters.port}/openapi.json"
    flags = (
        "--checks",
        "not_a_server_error",
        "--phases",
        "fuzzing",
        "--max-examples",
        "4",
        "--request-timeout",
        "60",
        "--seed",
        "1",
        "--no-color",
    )
    program = Path(sys.executable).parent / "schemathesis"
    done = subprocess.run([str(program), "run", url, *flags], capture_output=True, text=True, timeout=280, cwd=os.devnull[:1])
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout


def test_a_soak_leaves_nothing_behind(letters):
    """Slots, tasks and file descriptors are back at the start, and every answer was right."""

    def tasks():
        return len(asyncio.all_tasks(letters.loop))

    asyncio.run(soak(letters.port, 100, seed=1))
    letters.settle()
    before, files = tasks(), psutil.Process().num_fds()
    seen = asyncio.run(soak(letters.port, 600))
    assert seen == {"malformed": 60, "cancelled": 180, "right": 360}
    letters.settle()
    until(lambda: tasks() <= before and psutil.Process().num_fds() <= files)
    assert sorted(letters.engine._scheduler._free) == list(range(8))
