"""Mutated configs and headers in a bounded process: see fuzz.py. CI plays a share; `make fuzz` plays 2,000 and 500."""

import json
import os
import subprocess
import sys

import pytest

SHARE = float(os.environ.get("FUZZ_SHARE", "0.04"))
SECONDS_EACH = 2


@pytest.mark.timeout(0)
def test_each_mutation_loads_right_or_is_refused_with_one_sentence():
    """Absurd sizes once ended in a RuntimeError of torch's allocator."""
    counts = {"config": max(40, int(2000 * SHARE)), "header": max(40, int(500 * SHARE))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.fuzz", *(str(word) for pair in counts.items() for word in pair)],
        capture_output=True,
        text=True,
        timeout=60 + SECONDS_EACH * sum(counts.values()),
        check=False,
    )
    assert done.returncode == 0, f"the process died with {done.returncode}: {done.stderr[-2000:]}"
    for found in map(json.loads, done.stdout.splitlines()):
        assert found["wrong"] == []
        assert found["outside"] == [], "files outside the folder were opened"
        assert found["peak_mib"] < 1024
        assert found["loaded"] > 0  # the mutations are neither harmless nor hopeless
        assert found["refused"] > 0
