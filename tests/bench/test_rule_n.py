"""Rule N on logits made for it: what passes, what fails, and where the borders lie."""

import json
import math

import pytest
import torch

from bench.rule_n import rule_n

T, V = 40, 50


def exact(seed=0):
    """Logits as Hugging Face in float32 might give them, the best id of each position two ahead of the rest."""
    logits = torch.randn(T, V, generator=torch.Generator().manual_seed(seed)).clamp(-2, 2)
    logits[torch.arange(T), torch.arange(T) % V] = 4.0
    return logits


def test_the_same_logits_pass_with_no_error():
    logits = exact()
    verdict = rule_n(logits, logits, logits)
    assert verdict.passed
    assert (verdict.e, verdict.e0, verdict.scale) == (0, 0, 4)
    assert verdict.bound == pytest.approx(4e-3)
    assert (verdict.positions, verdict.decided, verdict.agreed) == (T, T, T)


def test_ours_may_be_twice_as_wrong_as_hugging_face_in_the_same_dtype():
    want = exact()
    rounded = want + 0.1
    assert rule_n(want + 0.2, want, rounded).passed
    verdict = rule_n(want + 0.21, want, rounded)
    assert not verdict.passed
    assert verdict.e == pytest.approx(0.21, abs=1e-5)
    assert verdict.bound == pytest.approx(0.2 + 4e-3, abs=1e-5)


def test_one_wrong_position_fails_and_is_found():
    want = exact()
    ours = want.clone()
    ours[T - 1, 3] += 1.5
    verdict = rule_n(ours, want, want)
    assert not verdict.passed
    assert verdict.errors.index(max(verdict.errors)) == T - 1


def test_two_logits_nearer_than_rounding_may_change_places():
    near = exact()
    near[7, 7] = 2.1  # the others reach 2: a gap that rounding of 0.2 does not decide
    flipped = near.clone()
    flipped[7, 7] = 1.9
    verdict = rule_n(flipped, near, near + 0.2)
    assert verdict.passed
    assert verdict.decided == T - 1


def test_a_decided_position_must_agree_even_inside_the_bound():
    """With e0 = 0.01 a gap of 0.045 is decided; an error of 0.03 is within the bound that the scale of 20 widens."""
    want = torch.tensor([[0.0, 0.045, -20.0]])
    ours = torch.tensor([[0.03, 0.02, -20.0]])
    verdict = rule_n(ours, want, want + 0.01)
    assert verdict.e <= verdict.bound
    assert (verdict.decided, verdict.agreed) == (1, 0)
    assert not verdict.passed


def test_a_tie_of_ours_goes_to_the_lowest_id():
    want = torch.tensor([[0.0, 1.0, 0.0]])
    assert rule_n(torch.tensor([[0.5, 0.5, 0.0]]), want, want + 0.2).agreed == 0


@pytest.mark.parametrize(("difference", "passes"), [(0.9e-3, True), (1.1e-3, False)])
def test_float32_runs_have_a_bound_of_their_own(difference, passes):
    want = exact()
    verdict = rule_n(want + difference, want, None)
    assert verdict.passed is passes
    assert verdict.bound == 1e-3
    assert verdict.e0 == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, T - 1])
def test_nan_and_infinity_fail_and_stay_valid_json(bad, position):
    want = exact()
    ours = want.clone()
    ours[position, 0] = bad
    verdict = rule_n(ours, want, want)
    assert not verdict.passed
    assert json.loads(json.dumps(verdict.as_json(), allow_nan=False))["e"] == str(bad)


def test_a_nan_in_hugging_face_does_not_let_ours_pass():
    want = exact()
    rounded = want.clone()
    rounded[3, 3] = math.nan
    assert not rule_n(want + 1, want, rounded).passed


def test_the_verdict_is_one_line():
    text = str(rule_n(exact(), exact(), exact()))
    assert text.startswith("rule N pass: e 0.000e+00 against 4.000e-03")
    assert "\n" not in text


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        rule_n(exact(), exact()[:5], None)
