"""`bench http`: what counts as a token and when it came, against streams of known shape."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from unittest.mock import patch

import httpx
import pytest

from bench.__main__ import run as door
from bench.http import Answer, Failure, HttpOptions, _body, _server, ask, result_of
from bench.output import Output
from runtime.errors import ConfigError

BODY = {"max_tokens": 64}


def event(text=None, usage=None, **delta):
    """A line of a chat stream."""
    choices = [] if text is None else [{"index": 0, "delta": {"content": text, **delta}}]
    return "data: " + json.dumps({"choices": choices, "usage": usage})


def play(lines, status=200, body=BODY):
    """Ask a server that sends `lines`, each with the second at which it comes."""
    clock = itertools.chain([0.0], (at for at, _ in lines))
    content = "\n\n".join(line for _, line in lines) + "\n\n"

    async def go():
        transport = httpx.MockTransport(lambda request: httpx.Response(status, text=content))
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1/") as client:
            now = [0.0]

            def tick():
                now[0] = next(clock)
                return now[0]

            return await ask(client, body, Lines(tick))

    return asyncio.run(go())


class Lines:
    """A clock that moves with the lines that are no separators."""

    def __init__(self, tick):
        self.tick, self.calls = tick, 0
        self.now = None

    def __call__(self):
        self.calls += 1
        if self.calls == 1 or self.calls % 2 == 0:  # an empty line follows each
            self.now = self.tick()
        return self.now


def stream(tokens, per_event, first, gap, usage=True):
    """A role event at 5 ms, then text, then usage."""
    lines = [(0.005, event("", role="assistant"))]
    lines += [(first + gap * i, event(" " * per_event)) for i in range(tokens // per_event)]
    end = lines[-1][0]
    return [*lines, (end, event(usage={"completion_tokens": tokens} if usage else None)), (end, "data: [DONE]")]


def test_a_role_is_no_token_and_an_event_may_carry_several():
    """The role's event counted as the first token, each event as one, and a hundred spaces as none."""
    answer = play(stream(64, per_event=4, first=0.05, gap=0.04))
    assert answer.events[0] == 0.05
    assert (answer.tokens, len(answer.events)) == (64, 16)
    assert answer.gaps == pytest.approx([0.01] * 15)
    assert answer.tpot == pytest.approx(0.01)


def test_a_token_an_event_needs_no_average():
    answer = play(stream(64, per_event=1, first=0.5, gap=0.003))
    assert answer.tokens_per_event == 1
    assert answer.gaps == pytest.approx([0.003] * 63)


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (stream(64, 1, 0.1, 0.01, usage=False), 200, "usage None"),
        (stream(64, 1, 0.1, 0.01)[:-1], 200, "no end"),
        (stream(60, 1, 0.1, 0.01), 200, "60 tokens came and 64"),
        ([(0.1, 'data: {"error": {"message": "the device failed"}}'), (0.1, "data: [DONE]")], 200, "the device failed"),
        ([(0.1, "busy")], 429, "status 429: busy"),
        ([(0.1, "data: []")], 200, "TypeError"),
        ([(0.1, 'data: {"id": 1}')], 200, "KeyError"),
        ([(0.1, 'data: {"choices": [null]}')], 200, "AttributeError"),
    ],
)
def test_what_was_not_asked_for_is_a_failure(lines, status, words):
    """An event without choices was a traceback, and every answer before it was lost."""
    with pytest.raises(Failure, match=words):
        play(lines, status)


def test_the_result_counts_failures_apart_and_flags_few_samples():
    options = HttpOptions("http://x", None, "secret", 2, 0, 1, 8, 64, Output(), {"api_key": "secret"})
    answers = [Answer(tuple(0.05 + 0.04 * i for i in range(16)), 64)]
    result = result_of(options, {"model": "m", "runtime": None}, answers, ["status 429"], seconds=2.0)
    assert (result["completed"], result["failed"], result["tokens"], result["averaged"]) == (1, 1, 64, True)
    assert (result["output_tok_s"], result["n_itl_ms"], result["p99_itl_ms_has_few_samples"]) == (32, 15, True)
    assert (result["mean_ttft_ms"], result["mean_itl_ms"]) == (50, pytest.approx(10))
    assert "secret" not in json.dumps(result)


def server_of(answer):
    """What is found out of a server that answers so."""

    async def told():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x/v1/") as client:
            return await _server(client, SimpleNamespace(model=None, url="http://x", prompt_len=100, gen_len=10))

    return asyncio.run(told())


def test_no_server_is_one_sentence(capsys):
    with pytest.raises(ConfigError, match="check --url"):
        door(["http", "--url", "http://127.0.0.1:9", "--requests", "1"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(401, json={"error": {}}), "^http://x asks for an API key; give its own with --api-key$"),
        (httpx.Response(404, text="no"), "^http://x does not .* '404 Not Found' for url '[^']*'; check --url$"),
        (httpx.Response(200, text="<html>"), "check --url"),
        (httpx.Response(200, json={"data": []}), "check --url"),
        (httpx.Response(200, json=[]), "check --url"),
        (httpx.Response(200, json={"data": ["m"]}), "check --url"),
        (httpx.Response(200, json={"data": [{"id": "m", "max_model_len": "8k"}]}), "check --url"),
    ],
)
def test_another_kind_of_answer_is_one_sentence(answer, words):
    with pytest.raises(ConfigError, match=words):
        server_of(lambda _: answer)


@pytest.mark.parametrize("room", [109, 110])
def test_what_the_servers_context_cannot_hold_is_told_before_anything_is_sent(room):
    """Every request was refused, or with millions of ids the client ran out of memory."""

    def answer(request):
        return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": room}]})

    if room < 110:
        with pytest.raises(ConfigError, match="--prompt-len 100 and --gen-len 10 do not fit the 109 positions of m"):
            server_of(answer)
    else:
        assert server_of(answer)["model"] == "m"


def test_a_server_that_answers_every_path_with_a_page_is_measured_all_the_same():
    """/v1/runtime is ours alone; another server's page there was a traceback."""

    def answer(request):
        page = httpx.Response(200, text="<html>")
        return httpx.Response(200, json={"data": [{"id": "m"}]}) if request.url.path == "/v1/models" else page

    assert server_of(answer) == {"model": "m", "runtime": None}


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:9/\udcff"])
def test_what_is_no_url_is_one_sentence(url):
    with pytest.raises(ConfigError, match="is no URL"):
        door(["http", "--url", url, "--requests", "1"])


@pytest.mark.parametrize(("flag", "words"), [("--model", "is no text"), ("--api-key", "no bearer token can")])
def test_bytes_that_are_no_utf_8_are_one_sentence(flag, words):
    """They were a traceback out of the client."""
    with pytest.raises(ConfigError, match=words):
        door(["http", "--requests", "1", flag, "a\udcff"])


def test_every_runs_prompts_are_its_own():
    """A second run was answered out of the cache that the first one had filled."""
    options = HttpOptions("http://x", None, None, 2, 0, 1, 64, 64, Output(), {})
    prompts = [_body(options, "m", number)["prompt"] for number in range(3)]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 3
    with patch("bench.http.RUN", 1):
        assert _body(options, "m", 0)["prompt"] not in prompts
