"""Draws: the generator's known answers, the filters' borders, ties, and frequencies against their probabilities."""

import math

import pytest
import torch

from runtime.request import SamplingParams
from runtime.sampling import NOT_FINITE, filter_logits, lowest_argmax, philox, sample, uniform, variant

V = 320


def draw(values, n=4000, rest=-30.0, seed=1, **params):
    """How often each id is drawn at n successive positions from fixed logits."""
    logits = torch.full((n, V), rest)
    for token, value in values.items():
        logits[:, token] = value
    p = SamplingParams(**params)
    rows = {name: torch.full((n,), float(getattr(p, name))) for name in ("temperature", "top_p", "min_p")}
    tokens = sample(
        logits,
        variant([p]),
        top_k=torch.full((n,), p.top_k, dtype=torch.int32),
        seed=torch.tensor([[seed, 0]], dtype=torch.int32).expand(n, 2),
        choice=torch.zeros(n, dtype=torch.int32),
        position=torch.arange(n, dtype=torch.int32),
        **rows,
    )
    return {token: count / n for token, count in zip(*(x.tolist() for x in tokens.unique(return_counts=True)), strict=True)}


@pytest.mark.parametrize(
    ("counter", "key", "first"),
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, first):
    word = philox(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
    assert word.item() == first


def test_uniforms_fill_the_open_interval_and_differ_by_seed_choice_and_position():
    def one(seed=(1, 0), choice=0, position=0):
        return uniform(torch.tensor([seed], dtype=torch.int32), torch.tensor([choice]), torch.tensor([position]), 50_000)[0]

    u = one()
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.005
    for other in (one(seed=(2, 0)), one(seed=(1, 1)), one(choice=1), one(position=1), one(seed=(-1, 0))):
        assert abs(torch.corrcoef(torch.stack((u, other)))[0, 1].item()) < 0.02


FOUR = {65: math.log(0.5), 66: math.log(0.3), 67: math.log(0.15), 68: math.log(0.05)}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_p": 0.3}, {65: 1.0}),
        ({"top_p": 0.6}, {65: 0.625, 66: 0.375}),
        ({"top_p": 0.85}, {65: 0.5263, 66: 0.3158, 67: 0.1579}),
        ({"top_p": 0.96}, {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}),
        ({"top_p": 1.0}, {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}),
        ({"top_p": 0.0}, {65: 1.0}),
        ({"top_k": 1}, {65: 1.0}),
        ({"top_k": 2}, {65: 0.625, 66: 0.375}),
        ({"top_k": 4}, {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}),
        ({"top_k": V}, {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}),
        ({"top_k": 100_000}, {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}),
        ({"top_k": 2, "top_p": 0.6}, {65: 1.0}),  # 0.625 of what top_k left reaches 0.6 alone
        ({"min_p": 0.5}, {65: 0.625, 66: 0.375}),
    ],
)
def test_filters_keep_the_token_that_crosses_and_renormalise(params, expected):
    """Nucleus sampling that drops the crossing token keeps a set lighter than top_p, so the output is too narrow."""
    drawn = draw(FOUR, temperature=1.0, **params)
    assert drawn.keys() == expected.keys()
    for token, p in expected.items():
        assert abs(drawn[token] - p) < 4 * math.sqrt(p * (1 - p) / 4000) + 1e-9


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_zero_and_tiny_temperatures_are_greedy(temperature, top_p):
    """Dividing by a temperature between zero and 1e-4 used to overflow into one junk token."""
    assert draw({65: 11.0, 66: 10.0}, rest=-20.0, n=200, temperature=temperature, top_p=top_p) == {65: 1.0}


def test_temperature_one_follows_the_softmax():
    assert abs(draw({65: 11.0, 66: 10.0}, rest=-20.0, temperature=1.0)[65] - 0.731) < 0.03


def test_eight_equal_logits_are_drawn_evenly_and_without_memory():
    logits = torch.full((4000, V), -30.0)
    logits[:, 65:73] = 1.0
    p = SamplingParams(temperature=1.0)

    def tokens(seed):
        n = len(logits)
        return sample(
            logits,
            variant([p]),
            temperature=torch.ones(n),
            top_p=torch.ones(n),
            min_p=torch.zeros(n),
            top_k=torch.zeros(n, dtype=torch.int32),
            seed=torch.tensor([[seed, 0]], dtype=torch.int32).expand(n, 2),
            choice=torch.zeros(n, dtype=torch.int32),
            position=torch.arange(n, dtype=torch.int32),
        )

    first, second, again = tokens(1), tokens(2), tokens(1)
    chi2 = sum((count - 500) ** 2 / 500 for count in torch.bincount(first - 65, minlength=8).tolist())
    assert chi2 < 24.3  # 7 degrees of freedom, p = 0.001
    assert abs((first[1:] == first[:-1]).float().mean().item() - 1 / 8) < 0.025
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_ties_go_to_the_lowest_id():
    assert draw({65: 5.0, 66: 5.0}, rest=0.0, n=200) == {65: 1.0}
    assert lowest_argmax(torch.zeros(3, 7)).tolist() == [0, 0, 0]


def test_near_values_are_compared_before_any_rounding():
    assert draw({65: 20.0, 66: 20.125}, n=50) == {66: 1.0}


def test_rows_of_a_mixed_batch_keep_their_own_parameters():
    logits = torch.full((3, V), -30.0)
    logits[:, 65], logits[:, 66] = 2.0, 1.0
    logits[1, 7] = float("nan")
    tokens = sample(
        logits,
        "full",
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 0, 1], dtype=torch.int32),
        top_p=torch.ones(3),
        min_p=torch.zeros(3),
        seed=torch.zeros(3, 2, dtype=torch.int32),
        choice=torch.zeros(3, dtype=torch.int32),
        position=torch.zeros(3, dtype=torch.int32),
    )
    assert tokens.tolist() == [65, NOT_FINITE, 65]


def test_a_row_keeps_its_best_token_whatever_the_filters_say():
    kept = filter_logits(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1]), torch.tensor([0.0]), torch.tensor([1.0]))
    assert torch.isfinite(kept).tolist() == [[False, True, False]]
