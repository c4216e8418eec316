"""Sampling defaults: generation_config.json's, then the API's; what a request says always wins."""

import math
from collections import Counter

import pytest

from models import find_model
from server.schema import SamplingDefaults
from tests import checkpoints
from tests.server.serving import local_server


@pytest.fixture(scope="module")
def two(folder):
    """A and B with logits 5 and 4; its generation_config.json is hot, narrow and wants a penalty."""
    path = checkpoints.tok_b(checkpoints.fixed(folder / "two", {65: 5.0, 66: 4.0}, rest=-10.0))
    wishes = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.5}
    checkpoints.write_json(path / "generation_config.json", wishes)
    sampling = find_model(str(path)).sampling
    assert sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    with local_server(path, settings={"defaults": SamplingDefaults(**sampling)}, max_slots=8) as server:
        yield server


def letters(server, **fields):
    choices = server.complete([65, 65], n=8, max_tokens=256, seed=1, **fields)["choices"]
    return Counter("".join(choice["text"] for choice in choices))


def test_what_a_request_leaves_out_comes_from_the_file(two):
    """At 0.7 A has 0.807 of the weight, which alone is more than the file's top_p."""
    assert letters(two).keys() == {"A"}
    assert letters(two, top_p=1).keys() == {"A", "B"}


def test_what_a_request_says_wins_also_where_it_is_zero_or_one(two):
    counts = letters(two, temperature=1.0, top_k=-1, top_p=1.0)
    share = counts["A"] / counts.total()
    assert abs(share - 0.7311) < 5 * math.sqrt(0.7311 * 0.2689 / counts.total())


def test_a_files_penalty_changes_no_greedy_answer(two):
    assert letters(two, temperature=0).keys() == {"A"}
