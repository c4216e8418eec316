"""Sampling parameters end to end: draws from known distributions, and values that no sampler may ever see."""

import math
from collections import Counter

import pytest

from tests import checkpoints
from tests.server.serving import TEXT, local_server, texts_of

DRAWS = 4096
WEIGHTS = {"A": 0.5, "B": 0.3, "C": 0.15, "D": 0.05}


def frequencies(server, draws=DRAWS, **fields):
    """Shares of each letter among many draws."""
    choices = server.complete([65], n=16, max_tokens=draws // 16, seed=1, **fields)["choices"]
    counts = Counter("".join(choice["text"] for choice in choices))
    assert counts.total() == draws
    return {letter: count / draws for letter, count in counts.items()}


def assert_close(found, expected):
    """Within five standard deviations of the draw."""
    assert found.keys() == expected.keys()
    for letter, p in expected.items():
        assert abs(found[letter] - p) <= 5 * math.sqrt(p * (1 - p) / DRAWS), (found, expected)


@pytest.fixture(scope="module")
def four(folder):
    """Draws A, B, C, D with the weights above, whatever came before."""
    values = {ord(letter): math.log(p) for letter, p in WEIGHTS.items()}
    path = checkpoints.tok_b(checkpoints.fixed(folder / "four", values, rest=-30, dtype=checkpoints.torch.float32))
    with local_server(path, max_slots=16) as server:
        yield server


def renormalised(letters):
    total = sum(WEIGHTS[letter] for letter in letters)
    return {letter: WEIGHTS[letter] / total for letter in letters}


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, "A"), (0.6, "AB"), (0.85, "ABC"), (0.96, "ABCD"), (1.0, "ABCD"), (0, "A")])
def test_top_p_keeps_the_token_that_crosses_it(four, top_p, kept):
    """The set kept was always lighter than top_p."""
    assert_close(frequencies(four, temperature=1, top_p=top_p), renormalised(kept))


@pytest.mark.parametrize(("top_k", "kept"), [(1, "A"), (2, "AB"), (4, "ABCD")])
def test_top_k_keeps_the_k_largest(four, top_k, kept):
    assert_close(frequencies(four, temperature=1, top_k=top_k), renormalised(kept))


def test_a_top_k_that_keeps_all_changes_nothing(four):
    fields = dict(n=4, max_tokens=32, seed=3)
    plain = four.complete([65], **fields)["choices"]
    for top_k in (0, -1, None, 320, 100_000, 2**40):
        assert four.complete([65], top_k=top_k, **fields)["choices"] == plain


def test_top_p_works_on_what_top_k_leaves(four):
    """Of A and B alone, A weighs 0.625 and reaches a top_p of 0.6 by itself."""
    assert frequencies(four, temperature=1, top_k=2, top_p=0.6) == {"A": 1.0}


@pytest.mark.parametrize(
    "fields",
    [{"top_p": -0.1}, {"top_p": 1.1}, {"top_k": -5}, {"top_k": 0.01}, {"top_k": "5"}, {"top_k": True}, {"temperature": -0.5}],
)
def test_values_without_meaning_are_refused(four, fields):
    status, error = four.refusal(prompt=[65], **fields)
    assert (status, error["param"]) == (400, next(iter(fields)))
    assert four.text([65], temperature=0, max_tokens=3) == "AAA"


FLAT = {"temperature": 1e300, "ignore_eos": True}  # every token is as likely, the end's too


@pytest.mark.parametrize("fields", [FLAT, {"min_tokens": 2**40, "max_tokens": 2**41}, {"seed": 2**64 - 1}, {"seed": -(2**63)}])
def test_huge_values_do_not_end_the_engine(four, fields):
    """They overflowed the words of a slot's state, outside of any request's error handling."""
    assert four.complete([65], **{"max_tokens": 4, **fields})["choices"][0]["finish_reason"] == "length"
    assert four.text([65], temperature=0, max_tokens=3) == "AAA"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_temperatures_near_zero_are_greedy(tmp_path, dtype):
    """Between zero and about 1e-4 a division overflowed and the answer was junk."""
    with local_server(checkpoints.tok_b(checkpoints.fixed(tmp_path / "m", {65: 11, 66: 10}, rest=-20)), dtype=dtype) as server:
        for temperature in (0, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
            for top_p in (1, 0.9):
                assert server.text([65], temperature=temperature, top_p=top_p, max_tokens=16) == "A" * 16
        share = frequencies(server, draws=1024, temperature=1)["A"]
        assert abs(share - 0.7311) < 0.07
        assert 0.5 < frequencies(server, draws=1024, temperature=2)["A"] < share


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"'])
def test_numbers_that_are_none_are_refused(letters, value):
    """Python's JSON reader takes NaN, range checks let it by, and the sampler failed for everybody."""
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "unknown")
    for name in names if value != '"NaN"' else names[:-1]:
        status, _ = letters.refusal(TEXT, content=f'{{"prompt": "a", "{name}": {value}}}'.encode())
        assert status == 400
    status, _ = letters.refusal(TEXT, content=f'{{"prompt": "a", "x": [{{"y": {value}}}], "temperature": "x"}}'.encode())
    assert status == 400


def test_equal_logits_go_to_the_lowest_id(fixed_five):
    """Ties were broken at random, so greedy answers changed between runs."""
    alone = fixed_five.complete([65], temperature=0, max_tokens=25)["choices"][0]["text"]
    assert alone == "A" * 25
    answers = []
    for size in (*range(1, 9), *range(1, 9), *range(1, 9)):
        answers += [choice["text"] for choice in fixed_five.complete([65], temperature=0, n=size, max_tokens=25)["choices"]]
        events = fixed_five.events(TEXT, prompt=[65], temperature=0, n=size, max_tokens=25)
        answers += ["".join(texts_of(events, index)) for index in range(size)]
    assert len(answers) == 216
    assert set(answers) == {alone}


def test_a_logit_that_is_larger_by_one_step_of_bfloat16_wins(tmp_path):
    path = checkpoints.tok_b(checkpoints.fixed(tmp_path / "m", {65: 20.0, 66: 20.125}))
    with local_server(path, dtype="bfloat16") as server:
        assert server.text([65], temperature=0, max_tokens=50) == "B" * 50
