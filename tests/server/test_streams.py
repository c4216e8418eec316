"""The form of an event stream and of a whole reply, as strict clients read them."""

import json
import socket
from unittest.mock import Mock

import pytest

from server.reply import Reply
from server.schema import StreamOptions
from server.serve import Protocol
from server.shapes import ChatEnvelope, CompletionEnvelope, Piece
from tests.server.conftest import END, with_tok_b
from tests.server.serving import (
    CHAT,
    TEXT,
    counts,
    finishes_of,
    local_server,
    parse_events,
    raw_request,
    read_until,
    texts_of,
    until,
)

LINES = "\n\u2028!"
SAY = dict(messages=[{"role": "user", "content": "a"}])


@pytest.fixture(scope="module")
def talker(folder):
    """Answers every chat and every completion of a line break with `\\u2028!` and the end."""
    data = LINES.encode()
    chain = dict(zip(data, [*data[1:], END], strict=True))
    with local_server(with_tok_b(folder / "talker", chain), max_len=64) as server:
        yield server


def constant(events, object):
    """Ids, objects, times and models of a stream are one."""
    heads = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    assert len(heads) == 1
    assert heads.pop()[1] == object


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("envelope", [ChatEnvelope, CompletionEnvelope])
def test_events_that_share_what_stands_around_their_text_are_those_encoded_whole(envelope, include_usage):
    named = 'a "\0" model'
    options = StreamOptions(include_usage=include_usage)
    reply = Reply(Mock(), Mock(), Mock(), envelope("id", 7, named), streamed=True, options=options)
    for index, text in [(0, "a"), (3, '"\\'), (0, "\0"), (3, "\u2028\U0001f600"), (0, '"\0"'), (0, " ")]:
        piece = Piece(index, text, None, None, first=False)
        [event] = reply._events(piece)
        assert [json.loads(event)] == reply._chunks(piece)
        assert event.isascii()


def test_a_chats_events(talker):
    events = talker.events(CHAT, **SAY, model="alias")
    constant(events, "chat.completion.chunk")
    assert events[0]["model"] == "alias"
    assert events[0]["id"].startswith("chatcmpl-")
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": "\u2028"},
        {"content": "!"},
        {},
    ]
    assert finishes_of(events) == ["stop"]
    assert all("usage" not in event for event in events)


def test_a_completions_events(talker):
    events = talker.events(TEXT, prompt="\n", max_tokens=9)
    constant(events, "text_completion")
    assert events[0]["id"].startswith("cmpl-")
    assert [event["choices"][0] for event in events] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        for text, finish in (("\u2028", None), ("!", None), ("", "stop"))
    ]


def test_a_whole_chat(talker):
    body = talker.http.post(CHAT, json=SAY).json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "\u2028!"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["completion_tokens"] == 5


def test_an_answer_that_ends_at_once_still_has_its_role_and_reason(letters):
    events = letters.events(CHAT, messages=[{"role": "user", "content": "z"}])
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}]
    assert finishes_of(events) == ["stop"]


def test_at_the_length_the_reason_rides_on_the_last_token(letters):
    events = letters.events(TEXT, prompt="a", max_tokens=3)
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events] == [
        ("b", None),
        ("c", None),
        ("d", "length"),
    ]


@pytest.mark.parametrize(("path", "fields"), [(CHAT, SAY), (TEXT, {"prompt": "\n"})])
class TestUsage:
    def test_it_comes_only_when_asked(self, talker, path, fields):
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            events = talker.events(path, **fields, **options)
            assert all(event["choices"] for event in events)

    def test_it_is_one_last_event_without_choices(self, talker, path, fields):
        events = talker.events(path, **fields, stream_options={"include_usage": True})
        whole = talker.http.post(path, json=fields).json()
        assert events[-1]["choices"] == []
        assert counts(events[-1]["usage"]) == counts(whole["usage"])
        assert all(event["choices"] and event["usage"] is None for event in events[:-1])

    def test_it_grows_when_asked_for_continuously(self, talker, path, fields):
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = talker.events(path, **fields, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]


def test_headers_of_a_stream(letters):
    headers = letters.http.post(TEXT, json={"prompt": "a", "stream": True}, headers={"x-request-id": "my-id"}).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"] == "my-id"


def test_a_client_of_http_1_0_gets_no_chunks(letters):
    """It cannot read them; their lengths stood between the events."""
    body = json.dumps(dict(prompt="a", stream=True, max_tokens=3)).encode()
    with letters.connect() as sock:
        sock.sendall(raw_request(TEXT, body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, events = read_until(sock, lambda data: False).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert texts_of(parse_events(events)) == ["b", "c", "d"]


def test_bytes_leave_at_once(letters, monkeypatch):
    """Without TCP_NODELAY a token can wait 40 ms for an acknowledgement."""
    options, made = [], Protocol.connection_made

    def look(protocol, transport):
        made(protocol, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Protocol, "connection_made", look)
    with letters.connect():
        until(lambda: options)
    assert options == [1]


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "\u00e9"])
def test_a_request_id_that_could_forge_a_log_line_is_replaced(letters, given):
    headers = {"x-request-id": given.encode("latin-1")}
    assert len(letters.http.get("/health", headers=headers).headers["x-request-id"]) == 32


def test_several_choices_have_an_index_each(letters):
    fields = dict(prompt=["a", "x", [65]], n=2, max_tokens=4, temperature=0)
    whole = letters.complete(**fields)
    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(["bcde", "bcde", "yz", "yz", "AAAA", "AAAA"]))
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (3, 22, 25)
    events = letters.events(TEXT, **fields)
    for choice in whole["choices"]:
        assert "".join(texts_of(events, choice["index"])) == choice["text"]
        assert finishes_of(events, choice["index"]) == [choice["finish_reason"]]


def test_choices_of_one_prompt_differ_and_a_seed_repeats_them(fixed_five):
    fields = dict(prompt=[65], n=4, max_tokens=12)
    first = fixed_five.complete(**fields, seed=7)["choices"]
    assert len({choice["text"] for choice in first}) == 4
    assert fixed_five.complete(**fields, seed=7)["choices"] == first
    assert fixed_five.complete(**fields, seed=8)["choices"] != first
    assert fixed_five.complete(**fields)["choices"] != fixed_five.complete(**fields)["choices"]
