"""Options of the draw beyond filters: penalties, bias, log-probabilities, echo, with values known by construction."""

import math

import pytest

from tests import checkpoints
from tests.server.conftest import END, with_tok_b
from tests.server.serving import CHAT, TEXT, local_server, texts_of

LOGPROBS = [-0.440190, -1.440190, -2.440190, -3.440190]
"""Log-softmax of 3, 2, 1, 0 beside three hundred logits of -30."""


def fixed_server(path, values, **options):
    """Logits as given, exact: bfloat16 weights, a run in bfloat16."""
    return local_server(checkpoints.tok_b(checkpoints.fixed(path, values, **options)), dtype="bfloat16", max_len=64)


@pytest.fixture(scope="module")
def two(folder):
    with fixed_server(folder / "two", {65: 5, 66: 4}, rest=-10) as server:
        yield server


@pytest.fixture(scope="module")
def stairs(folder):
    with fixed_server(folder / "stairs", {65: 3, 66: 2, 67: 1, 68: 0}, rest=-30) as server:
        yield server


class TestPenalties:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"presence_penalty": 2.0}, "ABAAAAA"),
            ({"frequency_penalty": 0.6}, "AABABAB"),
            ({"repetition_penalty": 1.5}, "BAAAAAA"),
            ({}, "AAAAAAA"),
        ],
    )
    def test_which_tokens_they_count(self, two, fields, text):
        """Presence and frequency punished the prompt too, or repetition did not."""
        fields = dict(fields, temperature=0, max_tokens=7)
        assert two.text([65] * 10, **fields) == text
        assert "".join(texts_of(two.events(TEXT, prompt=[65] * 10, **fields))) == text

    def test_negative_logits_are_multiplied(self, folder):
        """They were divided, which rewards."""
        with fixed_server(folder / "negative", {65: -1, 66: -1.1875}, rest=-30) as server:
            assert server.text([65] * 10, temperature=0, max_tokens=7, repetition_penalty=1.5) == "BAAAAAA"

    def test_a_neighbour_without_them_is_left_alone(self, two):
        """The defaults of a server's flags and another choice's parameters must not reach this one."""
        socks = [two.send(TEXT, prompt=[65], temperature=0, max_tokens=40, frequency_penalty=2) for _ in range(3)]
        assert two.text([65], temperature=0, max_tokens=40) == "A" * 40
        for sock in socks:
            sock.close()
        two.settle()


class TestBias:
    def test_it_is_added_to_the_logits(self, two):
        assert two.text([65], temperature=0, max_tokens=3, logit_bias={"66": 2}) == "BBB"
        assert two.text([65], temperature=0, max_tokens=3, logit_bias={"65": -100, "66": -100, "72": 1}) == "HHH"

    def test_an_id_outside_of_the_vocabulary_is_refused(self, two):
        status, error = two.refusal(prompt=[65], logit_bias={"320": 1})
        assert (status, error["param"]) == (400, "logit_bias")

    def test_all_banned_still_gives_a_token(self, two):
        whole = two.complete([65], max_tokens=3, logit_bias={"65": -100, "66": -100}, logprobs=0)["choices"][0]
        assert whole["finish_reason"] in ("length", "stop")
        assert all(math.isfinite(each) for each in whole["logprobs"]["token_logprobs"])

    def test_a_greedy_neighbour_with_bans_leaves_draws_alone(self, stairs):
        fields = dict(prompt=[65], temperature=1, n=3, max_tokens=16, seed=5)
        alone = stairs.complete(**fields)["choices"]
        with stairs.send(TEXT, prompt=[65], temperature=0, max_tokens=60, logit_bias={"65": -100, "66": -100}):
            assert stairs.complete(**fields)["choices"] == alone
        stairs.settle()


class TestLogprobs:
    @pytest.mark.parametrize(
        "fields", [{}, {"temperature": 0.5}, {"temperature": 0}, {"top_p": 0.5}, {"presence_penalty": 1, "seed": 3}]
    )
    def test_they_are_the_models_own_whatever_the_draw_does(self, stairs, fields):
        """They followed temperature or top_p in one path only, and top_p dropped the alternatives."""
        fields = {"temperature": 1, "seed": 1, **fields, "max_tokens": 6}
        told = stairs.complete([65], logprobs=4, **fields)["choices"][0]["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == 6
        assert told["text_offset"] == list(range(6))
        for token, own, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert list(top) == ["A", "B", "C", "D"]
            assert list(top.values()) == pytest.approx(LOGPROBS, abs=2e-3)
            assert own == top[token]
        events = stairs.events(TEXT, prompt=[65], logprobs=4, **fields)
        parts = [event["choices"][0]["logprobs"] for event in events]
        assert {name: [each for part in parts for each in part[name]] for name in told} == told

    def test_the_drawn_tokens_own_value_is_told_outside_of_the_best(self, stairs):
        told = stairs.complete([65], logprobs=1, logit_bias={"68": 100}, max_tokens=2)["choices"][0]["logprobs"]
        assert told["tokens"] == ["D", "D"]
        assert told["token_logprobs"] == pytest.approx([LOGPROBS[3]] * 2, abs=2e-3)
        assert [list(top) for top in told["top_logprobs"]] == [["A"], ["A"]]

    @pytest.mark.parametrize("count", [0, 3, 20])
    def test_chats_tell_bytes_too_and_as_many_as_asked_for(self, stairs, count):
        fields = dict(
            messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=count, max_tokens=2, temperature=0
        )
        whole = stairs.http.post(CHAT, json=fields).json()["choices"][0]["logprobs"]["content"]
        assert [len(each["top_logprobs"]) for each in whole] == [count, count]
        assert [(each["token"], each["bytes"]) for each in whole] == [("A", [65])] * 2
        values = [each["logprob"] for each in whole[0]["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        events = stairs.events(CHAT, **fields)
        assert [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]] == whole

    def test_top_logprobs_without_logprobs_are_refused(self, stairs):
        status, error = stairs.refusal(CHAT, messages=[{"role": "user", "content": "a"}], top_logprobs=2)
        assert (status, error["param"]) == (400, "top_logprobs")

    def test_tokens_of_half_a_character_and_the_end_have_an_entry_each(self, folder):
        """Half characters had one name, and hid each other."""
        chain = dict(zip([65, *"é".encode()], [*"é".encode(), END], strict=True))
        with local_server(with_tok_b(folder / "half", chain), max_len=32) as server:
            told = server.complete("A", logprobs=1, max_tokens=9)["choices"][0]["logprobs"]
            assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<|endoftext|>"]
            assert told["text_offset"] == [0, 1, 1]
            chat = dict(messages=[{"role": "user", "content": "a"}], logprobs=True, max_tokens=1)
            assert server.http.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"][0]["bytes"]


class TestEcho:
    def test_it_puts_the_prompt_in_front_streamed_or_not(self, letters):
        for prompt, shown in (("ab", "abcd"), ([97, 98], "abcd"), (["ab", "x"], "abcd")):
            fields = dict(prompt=prompt, echo=True, max_tokens=2)
            assert letters.complete(**fields)["choices"][0]["text"] == shown
            assert "".join(texts_of(letters.events(TEXT, **fields))) == shown

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_is_scored_without_an_answer(self, letters, stream):
        fields = dict(prompt="abd", echo=True, max_tokens=0, logprobs=1)
        body = letters.events(TEXT, **fields)[0] if stream else letters.complete(**fields)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abd", "length")
        told = choice["logprobs"]
        assert told["tokens"] == ["a", "b", "d"]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert told["token_logprobs"][1] == pytest.approx(0, abs=1e-3)
        assert told["token_logprobs"][2] < -20
        assert list(told["top_logprobs"][2]) == ["c"]
        if not stream:
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)

    def test_no_tokens_without_echo_are_refused(self, letters):
        assert letters.refusal(prompt="a", max_tokens=0, logprobs=1)[1]["param"] == "max_tokens"

    def test_ids_outside_of_the_vocabulary_are_refused_as_ever(self, letters):
        for token in (-1, 320, 2**70):
            assert letters.refusal(prompt=[token], echo=True)[0] == 400


@pytest.mark.usefixtures("alive")
def test_logits_of_infinity_end_their_request_alone(tmp_path):
    def poison(tensors):
        tensors["lm_head.weight"][70] = float("inf")

    path = checkpoints.tok_b(checkpoints.fixed(tmp_path / "m", {65: 5}, edit=poison))
    with local_server(path, max_len=32) as server:
        response = server.http.post(TEXT, json={"prompt": [65], "max_tokens": 3, "logprobs": 2})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "generation_failed"
        server.settle()
