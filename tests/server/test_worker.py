"""The engine's thread and its dispatcher: starting, draining, failing."""

import json
import logging
import pickle

import pytest

from runtime.errors import DeviceError, QuartetError, RequestError
from runtime.request import Request, TokenEvent
from server.dispatch import Dispatcher
from server.errors import STATUSES, ClientGoneError, status_of
from server.worker import Cancel, Report, Shutdown
from tests import checkpoints
from tests.server.serving import DEADLINE, TEXT, local_server, parse_events, read_until, slow_steps, until
from tests.server.test_gone import ENDLESS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [DeviceError("the device failed during a step"), ZeroDivisionError("/some/path")])
def test_a_failed_engine_fails_its_requests_and_the_health_check(alphabet_model, stream, error, caplog):
    with local_server(alphabet_model, max_slots=1) as server:
        running = server.send(TEXT, stream=stream, **ENDLESS)
        waiting = server.send(TEXT, stream=stream, **ENDLESS)
        until(lambda: (server.engine.num_running, server.engine.num_waiting) == (1, 1))

        def fail():
            raise error

        server.engine.step = fail
        for sock in (running, waiting):
            with sock:
                data = read_until(sock, lambda data: b"[DONE]" in data or b"}}" in data)
            assert b"/some/path" not in data
            if stream:
                assert data.count(b"data: [DONE]") == 1
                last = data.split(b"data: ")[-2]
                assert b'{"error":{' in last
            else:
                assert data.startswith(b"HTTP/1.1 503")
                assert b"x-should-retry: false" in data
        for path in ("/health", "/v1/models"):
            assert server.http.get(path).status_code == (503 if path == "/health" else 200)
        assert server.refusal(prompt="a")[0] == 503
        assert "died" in caplog.text


def test_logits_that_are_not_finite_end_one_request_and_no_retry_is_asked(tmp_path):
    def poison(tensors):
        tensors["model.embed_tokens.weight"][7] = float("nan")

    path = checkpoints.tok_b(checkpoints.chain(tmp_path / "m", lambda token: token, edit=poison))
    with local_server(path, max_len=64) as server:
        response = server.http.post(TEXT, json={"prompt": [7], "max_tokens": 5})
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["code"] == "generation_failed"
        content = server.http.post(TEXT, json={"prompt": [[65], [7]], "max_tokens": 5, "stream": True}).content
        events = parse_events(content)
        assert "not finite" in events[-1]["error"]["message"]
        assert server.text("A", max_tokens=3) == "AAA"
        server.settle()


def test_a_mistake_of_ours_is_a_500_without_its_words(letters, monkeypatch, caplog):
    def fail(*args):
        raise KeyError("/secret/path")

    monkeypatch.setattr("server.intake.Intake._job", fail)
    status, error = letters.refusal(prompt="a")
    assert (status, error["code"]) == (500, "internal_error")
    assert "secret" not in error["message"]
    assert "/secret/path" in caplog.text


def test_a_mistake_of_ours_in_a_stream_is_its_last_event(letters, monkeypatch, caplog):
    def fail(*args):
        raise KeyError("/secret/path")

    monkeypatch.setattr("server.reply.Reply._chunks", fail)
    events = letters.events(TEXT, prompt="a", max_tokens=5)
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(events)
    letters.settle()


def test_a_server_is_not_ready_before_its_engine_says_so(letters):
    """The dispatcher of a server whose thread has not come up yet."""
    dispatcher = Dispatcher(letters.engine, max_queue=1)
    with pytest.raises(QuartetError, match="starting") as caught:
        dispatcher.check()
    status = status_of(caught.value)
    assert (status.code, dict(status.headers)["retry-after"]) == (503, "5")


def test_draining_refuses_new_requests_and_finishes_the_old(alphabet_model):
    with local_server(alphabet_model, max_slots=1) as server:
        with slow_steps(server.engine, 0.1):
            sock = server.send(TEXT, prompt="A", max_tokens=300, stream=True)
            until(lambda: server.engine.num_running == 1)
            server.on_loop(server.service.dispatcher.drain(DEADLINE))
            until(lambda: server.service.dispatcher.state == "draining")
            for response in (server.http.get("/health"), server.http.post(TEXT, json={"prompt": "a"})):
                assert response.status_code == 503
                assert response.headers["retry-after"]
        with sock:
            data = read_until(sock, lambda data: b"[DONE]" in data)
        assert data.count(b'"text":"A"') == 300


def test_what_is_left_after_the_drain_ends_with_an_error(alphabet_model):
    with local_server(alphabet_model, max_slots=1) as server:
        with server.send(TEXT, stream=True, **ENDLESS) as sock, server.send(TEXT, **ENDLESS) as queued:
            until(lambda: (server.engine.num_running, server.engine.num_waiting) == (1, 1))
            server.on_loop(server.service.dispatcher.drain(0.1))
            data = read_until(sock, lambda data: b"[DONE]" in data)
            assert b"shutting down" in data
            assert read_until(queued, lambda data: b"}}" in data).startswith(b"HTTP/1.1 503")
        server.settle()


def test_messages_and_reports_could_cross_to_a_process():
    request = Request("a", (1, 2))
    messages = [request, Cancel("a"), Shutdown(), Report((TokenEvent("a", 1),), ("a",), 0.0, 1.0, 1, 0, 2, None)]
    assert pickle.loads(pickle.dumps(messages)) == messages


def test_every_error_has_a_status_and_none_that_cannot_succeed_asks_for_a_retry():
    def below(cls):
        return {cls}.union(*map(below, cls.__subclasses__()))

    for cls in below(QuartetError) - {ClientGoneError}:
        status = status_of(cls("x"))
        if issubclass(cls, RequestError):
            assert 400 <= status.code < 500
        elif status.code >= 500:
            assert {"retry-after", "x-should-retry"} & dict(status.headers).keys()
    assert all(issubclass(cls, QuartetError) for cls in STATUSES)


def test_one_line_tells_of_a_request(letters, caplog):
    with caplog.at_level(logging.INFO):
        letters.http.post(TEXT, json={"prompt": "a", "max_tokens": 5})
        until(lambda: any("finish=" in r.getMessage() for r in caplog.records))
    (line,) = [r.getMessage() for r in caplog.records if "finish=" in r.getMessage()]
    for part in (
        "prompt_tokens=1",
        "cached_tokens=",
        "completion_tokens=5",
        "queue_ms=",
        "first_token_ms=",
        "per_token_ms=",
        "finish=length",
    ):
        assert part in line
