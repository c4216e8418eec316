"""From tokens to text: where answers end, what is shown of them, and that streaming changes neither."""

import pytest

from tests import checkpoints
from tests.server.conftest import END, IM_END, with_tok_b
from tests.server.serving import TEXT, counts, finishes_of, local_server, texts_of

REST = "bcdefghijklmnopqrstuvwxyz"


def both(server, prompt, **fields):
    """Text, finish and completion tokens; streamed and whole must agree."""
    whole = server.complete(prompt, **fields)
    events = server.events(TEXT, prompt=prompt, stream_options={"include_usage": True}, **fields)
    text, finish = whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]
    assert "".join(texts_of(events)) == text
    assert finishes_of(events) == [finish]
    usage = whole["usage"]
    assert counts(events[-1]["usage"]) == counts(usage)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return text, finish, usage["completion_tokens"]


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "eos_token", "ends"),
    [
        (256, [256, 258], "<|endoftext|>", True),
        (256, 256, "<|im_end|>", True),
        ([256, 258], None, "<|endoftext|>", True),
        (None, None, None, False),
    ],
)
def test_every_source_of_end_ids_counts(tmp_path, config_eos, generation_eos, eos_token, ends):
    """Only one of several end ids was known, so instruct models ran on to max_tokens."""
    path = checkpoints.chain(tmp_path / "m", {65: 66, 66: IM_END, IM_END: 67, 67: 67}, eos_token_id=config_eos)
    checkpoints.tok_b(path, eos_token=eos_token)
    if generation_eos is not None:
        checkpoints.write_json(path / "generation_config.json", {"eos_token_id": generation_eos})
    with local_server(path, max_len=32) as server:
        assert both(server, "A", max_tokens=5) == (("B", "stop", 2) if ends else ("BCCC", "length", 5))
        assert both(server, "A", max_tokens=5, ignore_eos=True) == ("BCCC", "length", 5)


@pytest.mark.parametrize(
    ("limit", "answer"),
    [(1, ("b", "length", 1)), (25, (REST, "length", 25)), (26, (REST, "stop", 26)), (40, (REST, "stop", 26))],
)
def test_the_end_token_is_counted_and_never_shown(letters, limit, answer):
    """The 26th token ends the answer: cut before it the reason is length, with it stop."""
    assert both(letters, "a", max_tokens=limit) == answer


def test_min_tokens_keeps_the_end_away(letters):
    text, finish, tokens = both(letters, "y", max_tokens=40, min_tokens=4, temperature=0)
    assert tokens >= 5
    assert (text[0], finish) == ("z", "stop")


def test_stop_token_ids_end_an_answer_and_are_not_shown(letters):
    assert both(letters, "a", max_tokens=9, stop_token_ids=[101, 99]) == ("b", "stop", 2)


@pytest.mark.parametrize("character", ["\U0001f336", "\U0001fae0", "\u9f9c", "\u00e9"])
def test_a_character_of_several_tokens_is_shown_whole(tmp_path, character):
    """Half characters went out as U+FFFD."""
    data = character.encode()
    chain = dict(zip([65, *data], [*data, 66], strict=True)) | {66: END}
    with local_server(with_tok_b(tmp_path / "m", chain), max_len=32) as server:
        assert both(server, "A", max_tokens=20) == (character + "B", "stop", len(data) + 2)
        texts = texts_of(server.events(TEXT, prompt="A", max_tokens=20))
        assert texts == [character, "B", ""]
        text, finish, tokens = both(server, "A", max_tokens=len(data) - 1)
        assert (text in ("", "\ufffd"), finish, tokens) == (True, "length", len(data) - 1)


def test_spaces_between_words_survive_streaming(tmp_path):
    """Decoding the new tokens alone lost the space in front of them."""
    chain = {263: 264, 264: 265, 265: 2}
    plain = checkpoints.tok_s(checkpoints.chain(tmp_path / "plain", chain, eos_token_id=2))
    with local_server(plain, max_len=32) as server:
        assert both(server, "a", max_tokens=9) == (" b c", "stop", 3)
        assert texts_of(server.events(TEXT, prompt="a", max_tokens=9)) == [" b", " c", ""]
    chain = {263: 264, 264: 266, 266: 2}
    cleaning = checkpoints.chain(tmp_path / "cleaning", chain, eos_token_id=2)
    checkpoints.tok_s(cleaning, words=["▁."], clean_up_tokenization_spaces=True)
    with local_server(cleaning, max_len=32) as server:
        assert both(server, "a", max_tokens=9)[0] == " b ."


class TestStopTexts:
    @pytest.mark.parametrize(
        ("stop", "answer"),
        [
            (["def"], ("bc", "stop", 5)),
            ("def", ("bc", "stop", 5)),
            (["c"], ("b", "stop", 2)),
            (["cde", "bcdef"], ("b", "stop", 4)),
            (["ab"], (REST, "stop", 26)),
            (None, (REST, "stop", 26)),
            ([], (REST, "stop", 26)),
            (["a1", "a2", "a3", "a4", "a5"], (REST, "stop", 26)),
        ],
    )
    def test_an_answer_ends_before_its_stop(self, letters, stop, answer):
        """Stops were missed over token borders, or their first letters were already sent. Surplus tokens are not counted."""
        assert both(letters, "a", max_tokens=40, stop=stop) == answer

    def test_no_event_ever_holds_a_letter_of_the_stop(self, letters):
        assert texts_of(letters.events(TEXT, prompt="a", max_tokens=40, stop="def")) == ["b", "c", ""]
        assert texts_of(letters.events(TEXT, prompt="a", max_tokens=40, stop=["cde", "bcdef"])) == ["b", ""]

    def test_held_text_is_shown_when_it_turns_out_to_be_no_stop(self, letters):
        assert texts_of(letters.events(TEXT, prompt="a", max_tokens=5, stop="cdx")) == ["b", "cde", "f"]
        assert texts_of(letters.events(TEXT, prompt="a", max_tokens=3, stop="cdex")) == ["b", "cd"]
        assert texts_of(letters.events(TEXT, prompt="x", max_tokens=9, stop="yzz")) == ["yz", ""]

    def test_an_included_stop_is_the_end_of_the_text(self, letters):
        fields = dict(max_tokens=40, stop=["cde"], include_stop_str_in_output=True)
        assert both(letters, "a", **fields) == ("bcde", "stop", 4)
        assert texts_of(letters.events(TEXT, prompt="a", **fields)) == ["b", "c", "d", "e", ""]

    def test_the_stop_cut_at_the_length_still_says_stop(self, letters):
        assert both(letters, "a", max_tokens=5, stop="def") == ("bc", "stop", 5)

    def test_stops_are_looked_for_behind_min_tokens(self, letters):
        assert both(letters, "a", max_tokens=40, min_tokens=3, stop=["c", "g"]) == ("bcdef", "stop", 6)

    def test_nothing_of_a_token_is_shown_behind_the_stop_in_it(self, tmp_path):
        chain = {97: 98, 98: 99, 99: 259, 259: END}
        with local_server(with_tok_b(tmp_path / "m", chain, words=["de!"]), max_len=32) as server:
            assert both(server, "a", max_tokens=9, stop="e") == ("bcd", "stop", 3)

    def test_a_control_tokens_spelling_is_found_though_it_is_not_text(self, tmp_path):
        """A stop that is a special token's text never matched, because specials are hidden."""
        chain = {97: 98, 98: IM_END, IM_END: 99, 99: 99}
        with local_server(with_tok_b(tmp_path / "m", chain), max_len=32) as server:
            assert both(server, "a", max_tokens=9, stop=["<|im_end|>"]) == ("b", "stop", 2)
            included = both(server, "a", max_tokens=9, stop=["<|im_end|>"], include_stop_str_in_output=True)
            assert included == ("b<|im_end|>", "stop", 2)

    @pytest.mark.usefixtures("alive")
    @pytest.mark.parametrize("stop", ["", [""], ["", "def"], [None], [5], 5])
    def test_stops_without_meaning_are_refused(self, letters, stop):
        status, error = letters.refusal(prompt="a", stop=stop)
        assert (status, error["param"]) == (400, "stop")


def test_a_control_token_takes_no_place_in_text_offset(letters):
    """Its spelling was counted, though the text does not hold it."""
    biased = {"logit_bias": {"257": 100}, "max_tokens": 3, "ignore_eos": True, "logprobs": 0}
    for prompt in ("a", [97]):
        (choice,) = letters.complete(prompt, **biased)["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["<|im_start|>"] * 3
        assert choice["logprobs"]["text_offset"] == [0, 0, 0]
