"""The API's fields: what is taken, what is refused, and in which words."""

import pytest

from runtime.errors import RequestError
from server.errors import UnsupportedParameterError
from server.schema import NEUTRAL, ChatRequest, CompletionRequest, SamplingDefaults

USER = {"role": "user", "content": "a"}


def completion(**fields):
    return CompletionRequest.parse({"prompt": "a", **fields})


def chat(**fields):
    return ChatRequest.parse({"messages": [USER], **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], [[]]),
        ([[]], [[]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [5, True, {}, [1.5], [True], [None], ["a", 1], [1, "a"], [[1], [1.0]], [[True]], [["a"]]])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(RequestError, match="prompt must be") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_a_value_that_can_be_read_and_not_be_written_is_refused_all_the_same():
    """JSON nested nearly as deeply as Python's stack allows was a mistake of ours."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="temperature is nested too deeply; it must be a number"):
        completion(temperature=deep)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens", "n", "top_k", "seed"])
@pytest.mark.parametrize("value", [True, 1.0, 1.5, "5", [], {}])
def test_integers_are_integers(name, value):
    with pytest.raises(RequestError, match="must be an integer") as caught:
        completion(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", [True, "1", "NaN", [], 10**400])
def test_numbers_are_numbers(name, value):
    with pytest.raises(RequestError, match="must be a number") as caught:
        completion(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["stream", "ignore_eos", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(RequestError, match="must be true or false"):
        completion(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_completion_tokens": 0},
        {"min_tokens": -1},
        {"n": 0},
        {"n": 129},
        {"temperature": -0.5},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_k": -5},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"seed": 2**64},
        {"stream_options": []},
        {"stream_options": {"include_usage": 1}},
    ],
)
def test_values_out_of_range_are_refused_by_name(fields):
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param.startswith(next(iter(fields)))


def test_null_is_absent_everywhere():
    nulls = dict.fromkeys([*CompletionRequest.model_fields.keys() - {"prompt"}, *NEUTRAL])
    assert completion(**nulls) == completion()
    assert completion(stream_options={"include_usage": None}) == completion()
    with pytest.raises(RequestError, match="prompt is missing"):
        completion(prompt=None)


@pytest.mark.parametrize(
    ("fields", "limit"), [({}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 3}, 3)]
)
def test_the_newer_name_of_max_tokens_wins(fields, limit):
    assert completion(**fields).limit == limit


def test_a_chat_without_max_tokens_runs_to_the_end_of_the_context():
    assert chat().limit is None


@pytest.mark.parametrize(
    ("stop", "stops"), [("x", ["x"]), (["x", "y"], ["x", "y"]), (None, []), ([], []), (["x"] * 16, ["x"] * 16)]
)
def test_forms_of_stop(stop, stops):
    assert completion(stop=stop).stop == stops


@pytest.mark.parametrize("stop", ["", [""], ["", "def"], [None], [5], 5, True, ["x"] * 17])
def test_stops_that_are_refused(stop):
    with pytest.raises(RequestError) as caught:
        completion(stop=stop)
    assert caught.value.param == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"suffix": "x"},
        {"best_of": 2},
        {"best_of": True},
        {"guided_json": {}},
    ],
)
def test_fields_that_are_not_built_and_change_the_answer_are_refused(fields):
    for parse in (completion, chat):
        with pytest.raises(UnsupportedParameterError) as caught:
            parse(**fields)
        assert caught.value.param == next(iter(fields))


def test_their_neutral_values_pass():
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    assert completion(**neutral, logprobs=False, logit_bias={}) == completion()
    assert chat(**neutral, logprobs=False) == chat()


def test_fields_of_one_endpoint_are_unsupported_at_the_other():
    for parse, fields in ((completion, {"top_logprobs": 3}), (chat, {"echo": True})):
        with pytest.raises(UnsupportedParameterError) as caught:
            parse(**fields)
        assert caught.value.param == next(iter(fields))


def test_the_options_of_the_draw_reach_the_sampler():
    fields = dict(presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.1)
    params = completion(**fields, logit_bias={"5": 1, "07": -2.5}, logprobs=3).sampling(SamplingDefaults(), 0, 0)
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.logit_bias, params.logprobs) == (((5, 1.0), (7, -2.5)), 3)
    for told, logprobs in (({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)):
        assert chat(**told).sampling(SamplingDefaults(), 0, 0).logprobs == logprobs
    assert completion(logprobs=0).sampling(SamplingDefaults(), 0, 0).logprobs == 0


BIASES = ([], "x", 5, {"a": 1}, {"-1": 1}, {"1.5": 1}, {"": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"5": None})


@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_is_a_number_for_an_id(bias):
    with pytest.raises(RequestError, match="logit_bias must be") as caught:
        completion(logit_bias=bias)
    assert caught.value.param == "logit_bias"


def test_a_bias_of_one_id_under_two_spellings_is_refused():
    """The second one won without a word."""
    with pytest.raises(RequestError, match="names a token id twice"):
        completion(logit_bias={"01": 1, "1": 2})


def test_unknown_fields_are_ignored_and_named_in_the_debug_log(caplog):
    with caplog.at_level("DEBUG"):
        assert completion(user="x", metadata={"a": 1}, store=True) == completion()
    assert "['metadata', 'store', 'user']" in caplog.text


def test_a_chats_content_is_text_or_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": None}]
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": parts, "name": "bo", "x": 1}]
    flat = chat(messages=messages).flatten()
    assert flat == [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb", "name": "bo"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("a", "messages"),
        ([3], "messages.0"),
        ([USER, {"role": "SYSTEM", "content": "a"}], "messages.1.role"),
        ([{"content": "a"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages"),
    ],
)
def test_messages_that_are_refused(messages, param):
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ],
)
def test_images_and_tool_calls_are_unsupported(message):
    with pytest.raises(UnsupportedParameterError):
        chat(messages=[message])


def test_a_request_wins_over_the_defaults_even_with_zero():
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)
    params = completion(temperature=0, top_p=1, top_k=0, min_p=0, seed=0).sampling(defaults, seed=5, choice=3)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.choice) == (0, 1, 0, 0, 0, 3)
    params = completion().sampling(defaults, seed=5, choice=0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.7, 0.8, 20, 0.1, 5)
