"""The search for stop strings: what is shown, what is held back, and that the cutting of the text does not matter."""

import itertools
import random

import pytest

from server.answer import StopMatcher


def shown(text, stops, include=False, cuts=()):
    """The pieces shown for a text that comes in pieces, and whether a stop was found."""
    matcher, pieces = StopMatcher(stops, include), []
    bounds = [0, *cuts, len(text)]
    for start, end in itertools.pairwise(bounds):
        pieces.append(matcher.push(text[start:end]))
        if matcher.found:
            return pieces, True
    return [*pieces, matcher.flush()], False


def by_hand(text, stops, include):
    """The definition, read literally: the first character that completes a stop decides, the longest stop there is cut."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include else text[: end - max(map(len, complete))]
    return text


@pytest.mark.parametrize(
    ("stops", "text"),
    [(["def"], "bc"), (["c"], "b"), (["cde", "bcdef"], "b"), (["bcde", "cde"], ""), (["ab"], "bcdefgh"), ([], "bcdefgh")],
)
def test_the_text_ends_before_the_stop_that_is_complete_first(stops, text):
    assert "".join(shown("bcdefgh", stops, cuts=range(1, 7))[0]) == text


def test_an_included_stop_ends_the_text_and_nothing_is_held_back():
    pieces, found = shown("bcdefgh", ["cde"], include=True, cuts=range(1, 7))
    assert (pieces, found) == (["b", "c", "d", "e"], True)


def test_nothing_follows_a_stop_inside_a_piece():
    assert shown("bcde!", ["e"], cuts=[2])[0] == ["bc", "d"]


def test_text_is_held_back_only_while_it_begins_a_stop():
    matcher = StopMatcher(["abac"])
    assert [matcher.push(char) for char in "xabab"] == ["x", "", "", "", "ab"]
    assert matcher.push("y") == "aby"
    assert matcher.push("a") == ""
    assert matcher.flush() == "a"


def test_any_cutting_gives_what_the_definition_gives():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 14)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        cuts = sorted(rng.choices(range(1, len(text) + 1), k=rng.randrange(0, 5)))
        include = rng.random() < 0.5
        expected = by_hand(text, stops, include)
        pieces, found = shown(text, stops, include, cuts)
        assert "".join(pieces) == expected, (text, stops, include, cuts)
        assert found == any(stop in text for stop in stops)


def test_a_long_repetitive_stop_costs_a_step_a_character():
    matcher = StopMatcher(["a" * 20_000 + "b"])
    for _ in range(100):
        matcher.push("a" * 1000)
    assert matcher.push("b") == ""
    assert matcher.found


def test_of_a_long_stop_only_what_was_met_is_looked_at():
    """Sixteen of 400,000 characters in one request held up the event loop for forty seconds."""
    matcher = StopMatcher(["ab" * 200_000])
    assert matcher.push("xabab") == "x"
    assert len(matcher._patterns[0]._border) == 4
