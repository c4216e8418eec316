"""Where prompts and answers meet a limit: the context, max_tokens, the vocabulary; and which ids a prompt becomes."""

import pytest

from server.shapes import usage
from tests import checkpoints
from tests.server.conftest import with_tok_b
from tests.server.serving import CHAT, TEXT, finishes_of, local_server, texts_of

BOS_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def short(folder):
    """`A` for ever, in a context of 64 positions."""
    path = with_tok_b(folder / "short", lambda token: token, max_position_embeddings=64)
    with local_server(path) as server:
        yield server


@pytest.fixture
def short_alive(short):
    yield
    assert short.text("A", max_tokens=3) == "AAA"
    short.settle()


@pytest.mark.usefixtures("short_alive")
class TestContext:
    @pytest.mark.parametrize(("prompt", "produced"), [(60, 4), (63, 1)])
    def test_an_answer_is_cut_at_the_end_of_the_context(self, short, prompt, produced):
        """One step past the table was an assert on the device, and the end of the process."""
        for limit in (100, 2**31, 10**30):
            whole = short.complete("A" * prompt, max_tokens=limit)
            assert whole["choices"][0]["finish_reason"] == "length"
            assert whole["choices"][0]["text"] == "A" * produced
            assert whole["usage"] == usage(prompt, produced, whole["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert whole["usage"]["total_tokens"] == 64
            events = short.events(TEXT, prompt="A" * prompt, max_tokens=limit)
            assert texts_of(events) == ["A"] * produced
            assert finishes_of(events) == ["length"]

    @pytest.mark.parametrize("length", [64, 65, 5000])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_that_leaves_no_room_is_refused_before_any_event(self, short, length, stream):
        for path, fields in (
            (TEXT, {"prompt": "A" * length}),
            (TEXT, {"prompt": [65] * length}),
            (TEXT, {"prompt": ["A", "A" * length]}),
            (CHAT, {"messages": [{"role": "user", "content": "A" * length}]}),
        ):
            status, error = short.refusal(path, **fields, stream=stream)
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
            assert "64" in error["message"]
            assert str(length) in error["message"] or path == CHAT

    def test_a_chat_without_a_limit_runs_to_the_end_of_the_context(self, short):
        whole = short.http.post(CHAT, json={"messages": [{"role": "user", "content": "A"}]}).json()
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["total_tokens"] == 64


@pytest.mark.usefixtures("short_alive")
class TestMaxTokens:
    @pytest.mark.parametrize("value", [0, -1, -160, 1.5, "5", True])
    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_values_that_are_no_count_are_refused(self, short, name, value):
        status, error = short.refusal(prompt="A", **{name: value})
        assert (status, error["param"]) == (400, name)

    @pytest.mark.parametrize(
        ("fields", "tokens"),
        [
            ({"max_tokens": 1}, 1),
            ({"max_tokens": None}, 16),
            ({}, 16),
            ({"max_completion_tokens": 3}, 3),
            ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
            ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ],
    )
    def test_the_newer_name_wins_and_completions_have_a_default(self, short, fields, tokens):
        assert short.complete("A", **fields)["usage"]["completion_tokens"] == tokens


@pytest.mark.usefixtures("short_alive")
class TestIds:
    @pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["A", ""], [[65], []]])
    def test_prompts_without_a_token_are_refused(self, short, prompt):
        """One empty prompt ended the engine for everybody."""
        status, error = short.refusal(prompt=prompt)
        assert (status, error["param"]) == (400, "prompt")

    @pytest.mark.parametrize("token", [-1, 320, 4294967295, 5279552648203111001, 2**70, 1.5, True, None])
    def test_ids_outside_of_the_vocabulary_are_refused(self, short, token):
        for prompt in ([token], [65, token], [[65], [token]]):
            status, error = short.refusal(prompt=prompt)
            assert (status, error["param"]) == (400, "prompt")

    def test_the_last_id_of_the_vocabulary_is_fine(self, short):
        assert short.complete([319], max_tokens=2)["usage"]["completion_tokens"] == 2

    @pytest.mark.parametrize("ids", [[320], [-1], [None], [2**40], 5, list(range(17))])
    def test_stop_token_ids_are_checked_too(self, short, ids):
        status, error = short.refusal(prompt="A", stop_token_ids=ids)
        assert status == 400
        assert error["param"].startswith("stop_token_ids")

    def test_too_many_stop_token_ids_are_told_as_they_were_given(self, short):
        """The model's own end ids were counted among them: of 17 the error said 18."""
        _, error = short.refusal(prompt="A", stop_token_ids=list(range(17)))
        assert error["message"] == "stop_token_ids name 17 ids; at most 15 fit beside the model's own end ids"
        assert short.complete("A", stop_token_ids=list(range(15)), max_tokens=1)

    def test_more_choices_than_can_ever_be_in_are_refused_for_good(self, short):
        status, error = short.refusal(prompt=["A"] * 100, n=2)
        assert (status, error["code"]) == (400, "invalid_value")
        assert "136" in error["message"]


def test_half_a_surrogate_pair_is_refused(letters):
    """It cannot be encoded, and became a 500."""
    status, _ = letters.refusal(TEXT, content=b'{"prompt": "a\\ud83c"}')
    assert status == 400
    assert letters.refusal(CHAT, content=b'{"messages": [{"role": "user", "content": "\\uDC00"}]}')[0] == 400
    whole = letters.http.post(TEXT, content=b'{"prompt": "\\ud83c\\udf36", "max_tokens": 1}')
    assert whole.json()["usage"]["prompt_tokens"] == 4


def test_the_prompt_gets_one_bos(tmp_path):
    """The template wrote BOS and the tokenizer added another."""
    path = checkpoints.tok_s(
        checkpoints.chain(tmp_path / "m", {260: 264, 263: 264}, eos_token_id=2), chat_template=BOS_TEMPLATE
    )
    with local_server(path, max_len=32) as server:
        chat = server.http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).json()
        assert chat["usage"]["prompt_tokens"] == 2
        assert server.complete("a", max_tokens=1)["usage"]["prompt_tokens"] == 2
        assert server.complete("<s>a", max_tokens=1)["usage"]["prompt_tokens"] == 2
        assert server.complete("", max_tokens=1)["usage"]["prompt_tokens"] == 1
        assert chat["choices"][0]["message"]["content"] == " b"


def test_a_chat_template_is_needed_for_chats_and_its_refusal_is_told(tmp_path):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}a"
    path = checkpoints.chain(tmp_path / "m", {97: 98})
    with local_server(checkpoints.tok_b(path, chat_template=None), max_len=32) as server:
        status, error = server.refusal(CHAT, messages=[{"role": "user", "content": "a"}])
        assert (status, error["param"]) == (400, "messages")
        assert "template" in error["message"]
    with local_server(checkpoints.tok_b(path, chat_template=refusing), max_len=32) as server:
        status, error = server.refusal(CHAT, messages=[{"role": "system", "content": "a"}])
        assert status == 400
        assert "no system role here" in error["message"]
        assert server.http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]}).status_code == 200


def test_a_model_without_a_tokenizer_takes_and_gives_ids(alphabet_model):
    with local_server(alphabet_model, text=False, max_len=64) as server:
        assert server.text([97], max_tokens=3) == " 98 99 100"
        assert texts_of(server.events(TEXT, prompt=[97], max_tokens=3)) == [" 98", " 99", " 100"]
        assert server.refusal(prompt="a")[0] == 400
        assert server.refusal(CHAT, messages=[{"role": "user", "content": "a"}])[0] == 400
