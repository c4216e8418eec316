"""Clients that go away or do not read: their slots are free within a token, and nobody else notices."""

import json
import logging
import re
import socket
import threading
import time

import pytest

from tests import checkpoints
from tests.server.serving import DEADLINE, TEXT, local_server, raw_request, read_until, slow_steps, texts_of, until

ENDLESS = dict(prompt="A", max_tokens=8000, ignore_eos=True)


def finishes(caplog):
    """How each request that is over ended, by the log."""
    return [message.rpartition("finish=")[2] for message in caplog.messages if "finish=" in message]


@pytest.mark.parametrize("stream", [True, False])
def test_fifty_clients_that_reset_their_connection_leave_nothing_behind(letters, stream, caplog):
    """The engine went on to max_tokens for a closed connection, and blocked the others."""
    alone = min(first_token_seconds(letters, caplog) for _ in range(3))
    with caplog.at_level(logging.INFO), slow_steps(letters.engine):
        for _ in range(5):
            socks = [letters.send(TEXT, stream=stream, **ENDLESS) for _ in range(8)]
            until(lambda: letters.engine.num_running == 8)
            socks += [letters.send(TEXT, stream=stream, **ENDLESS) for _ in range(2)]
            until(lambda: letters.engine.num_waiting == 2)
            if stream:
                for sock in socks[:8]:
                    read_until(sock, lambda data: data.count(b'"text":"A"') >= 3)
            for sock in socks:
                sock.close()
            until(lambda: not letters.engine.has_work, 1)
            letters.settle()
        until(lambda: len(finishes(caplog)) == 50)
    assert set(finishes(caplog)) == {"cancelled"}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(letters.engine._scheduler._free) == 8
    assert first_token_seconds(letters, caplog) < 5 * alone + 0.1


@pytest.mark.parametrize(("waits", "size"), [(False, 0), (True, 0), (True, 1 << 20)])
def test_pipelined_requests_of_a_client_that_resets_are_all_cancelled(letters, waits, size, caplog):
    """uvicorn tells a connection's newest request alone: the one that ran went on to its end, and each wrote a traceback.
    Where more came while one ran, it read no further, and the end was never heard."""
    with caplog.at_level(logging.INFO), slow_steps(letters.engine):
        with letters.send(TEXT, n=2, **ENDLESS) as sock:
            if waits:
                until(lambda: letters.engine.num_running == 2)
            sock.sendall(2 * raw_request(TEXT, json.dumps({**ENDLESS, "n": 2, "user": "x" * size}).encode()))
            until(lambda: letters.engine.num_running == 2)
            time.sleep(0.05)  # for the server to read them
        until(lambda: not letters.engine.has_work, 1)
        letters.settle()
        until(lambda: finishes(caplog))
    assert set(finishes(caplog)) == {"cancelled"}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def first_token_seconds(server, caplog):
    """How long a client waits for its first token. The log is empty then, also of this request, which it tells of later."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        start = time.monotonic()
        with server.send(TEXT, prompt="a", stream=True, max_tokens=1) as sock:
            read_until(sock, lambda data: b"[DONE]" in data)
            seconds = time.monotonic() - start
        until(lambda: finishes(caplog))
    server.settle()
    caplog.clear()
    return seconds


@pytest.mark.parametrize("broken", [b"GARBAGE\r\n\r\n", raw_request(TEXT, b'{"prompt"', "100")])
def test_no_refusal_stands_in_the_middle_of_a_stream(letters, broken):
    """What a client sent behind a request whose answer streamed, and was no request, was refused between two tokens."""
    with slow_steps(letters.engine), letters.send(TEXT, stream=True, **ENDLESS) as sock:
        read_until(sock, lambda data: b'"text":"A"' in data)
        sock.sendall(broken)
        sock.shutdown(socket.SHUT_WR)
        rest = read_until(sock, lambda data: False)
    assert b"HTTP/1.1" not in rest
    assert b"[DONE]" not in rest
    letters.settle()


def test_a_slot_is_free_within_a_token_of_its_clients_end(letters, monkeypatch):
    """Steps are counted from the moment the event loop has told the engine's thread of the end."""
    steps, heard = [], []
    step, cancel = letters.engine.step, letters.service.dispatcher.cancel
    monkeypatch.setattr(letters.engine, "step", lambda: steps.append(1) or step())
    monkeypatch.setattr(letters.service.dispatcher, "cancel", lambda request_id: cancel(request_id) or heard.append(len(steps)))
    with letters.send(TEXT, stream=True, **ENDLESS) as sock:
        read_until(sock, lambda data: data.count(b'"text":"A"') >= 3)
    until(lambda: not letters.engine.has_work)
    assert len(steps) - heard[0] <= 2  # one that was about to begin, and the one that tells of the end


def test_a_client_that_goes_during_prefill_stops_it(alphabet_model):
    """The third of 500 chunks waits until the event loop has heard of the end; none follows it."""
    with local_server(alphabet_model, max_slots=1, prefill_chunk=16) as server:
        chunks, told = [], threading.Event()
        prefill, cancel = server.engine.model.prefill, server.service.dispatcher.cancel
        server.service.dispatcher.cancel = lambda request_id: cancel(request_id) or told.set()

        def held(*args):
            chunks.append(1)
            assert len(chunks) < 3 or told.wait(DEADLINE)
            return prefill(*args)

        server.engine.model.prefill = held
        with server.send(TEXT, prompt=[65] * 8000, max_tokens=5):
            until(lambda: len(chunks) == 3)
        until(lambda: not server.engine.has_work, 1)
        server.settle()
        assert len(chunks) == 3
        server.engine.model.prefill = prefill
        assert server.text("a", max_tokens=3) == "bcd"


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT"])
def test_a_client_that_sends_no_request_or_half_of_one_is_not_waited_for_without_end(alphabet_model, sent, monkeypatch):
    """Its connection stayed open for ever: only behind an answer did the server's patience end."""
    monkeypatch.setattr("server.serve.KEEP_ALIVE_SECONDS", 0.5)
    with local_server(alphabet_model, max_len=32) as server, server.connect() as sock:
        sock.sendall(sent)
        assert read_until(sock, lambda data: False) == b""


def test_a_client_that_goes_while_it_sends_its_body_is_no_error(letters, caplog):
    with caplog.at_level(logging.INFO):
        with letters.connect() as sock:
            sock.sendall(raw_request(TEXT, b'{"prompt"', "1000", headers="Expect: 100-continue\r\n"))
            read_until(sock, lambda data: b"100 Continue" in data)  # it reads the body
        until(lambda: any("went away" in r.getMessage() for r in caplog.records))
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert letters.text("a", max_tokens=3) == "bcd"


def test_a_client_that_never_reads_is_given_up(alphabet_model, monkeypatch, caplog):
    """What it does not read is kept nowhere without bound: the connection fills, and after a while it counts as gone."""
    monkeypatch.setattr("server.serve.SEND_SECONDS", 0.3)
    with caplog.at_level(logging.INFO), local_server(alphabet_model, send_buffer=4096, max_slots=1) as server:
        fields = dict(
            ENDLESS, stream=True, max_tokens=8000, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        with server.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(raw_request(TEXT, json.dumps(fields).encode()))
            until(lambda: any("has read nothing" in message for message in caplog.messages))
            server.settle()
            assert server.text("a", max_tokens=3) == "bcd"


def test_a_client_that_reads_a_long_answer_slowly_is_not_given_up(alphabet_model, monkeypatch):
    monkeypatch.setattr("server.serve.SEND_SECONDS", 1.5)
    with local_server(alphabet_model, send_buffer=4096) as server, server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(raw_request(TEXT, json.dumps(dict(ENDLESS, n=8, max_tokens=400, logprobs=3)).encode()))
        until(lambda: server.engine.num_running == 8)
        until(lambda: not server.engine.has_work)
        head, _, body = sock.recv(4096).partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        assert length > 200_000  # more than the connection takes at once
        start = time.monotonic()
        while len(body) < length and (part := sock.recv(4096)):
            body += part
            time.sleep(0.1 if time.monotonic() - start < 3.2 else 0)
    assert len(json.loads(body)["choices"]) == 8


def test_a_slow_reader_gets_every_token_and_delays_nobody(letters):
    """Its tokens wait for it; a request can leave no more of them than the context has positions."""
    body = json.dumps(dict(ENDLESS, stream=True, max_tokens=600)).encode()
    with letters.connect() as sock:
        sock.sendall(raw_request(TEXT, body))
        assert letters.text("a", max_tokens=3) == "bcd"
        until(lambda: not letters.engine.has_work)
        data = read_until(sock, lambda data: b"[DONE]" in data)
    assert data.count(b'"text":"A"') == 600


@pytest.fixture(scope="module")
def random_model(folder):
    """TINY in float32, which answers with ids; two requests may wait beside eight."""
    path = checkpoints.tok_b(checkpoints.tiny(folder / "tiny", max_position_embeddings=4096))
    with local_server(path, {"max_queue": 2}, text=False) as server:
        yield server


@pytest.fixture
def slowly(random_model):
    with slow_steps(random_model.engine):
        yield


class TestMany:
    """Requests at once: the same texts as alone, in turn, and not more than the queue holds."""

    def test_eight_streams_at_once_give_the_same_texts_as_alone(self, random_model):
        prompts = [[(7 * i + 3 * j) % 512 for j in range(3 + 9 * i)] for i in range(8)]
        sampled = [dict(prompt=p, max_tokens=40, temperature=float(i % 2), seed=i) for i, p in enumerate(prompts)]
        alone = [random_model.text(**fields) for fields in sampled]
        assert alone == [random_model.text(**fields) for fields in sampled]
        together = [""] * 8

        def ask(i):
            together[i] = "".join(texts_of(random_model.events(TEXT, **sampled[i])))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone

    @pytest.mark.usefixtures("slowly")
    def test_a_ninth_waits_its_turn_and_a_full_queue_says_so(self, random_model):
        body = dict(prompt=[1], max_tokens=4000, stream=True, temperature=0)
        running = [random_model.send(TEXT, **body) for _ in range(8)]
        until(lambda: random_model.engine.num_running == 8)
        waiting = [random_model.send(TEXT, **{**body, "max_tokens": 3}) for _ in range(2)]
        until(lambda: random_model.engine.num_waiting == 2)
        until(lambda: random_model.http.get("/health").json() == {"status": "ok", "running": 8, "waiting": 2})
        response = random_model.http.post(TEXT, json=body)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "queue_full"
        with waiting[0], waiting[1]:
            running.pop().close()
            data = read_until(waiting[0], lambda data: b"[DONE]" in data)
            assert data.count(b'"finish_reason":"length"') == 1
            read_until(waiting[1], lambda data: b"[DONE]" in data)
        for sock in running:
            sock.close()
        random_model.settle()

    @pytest.mark.usefixtures("slowly")
    def test_the_queue_takes_all_choices_of_a_request_or_none(self, random_model):
        assert len(random_model.complete([1], n=10, max_tokens=2)["choices"]) == 10
        with random_model.send(TEXT, prompt=[1], n=10, max_tokens=4000):
            until(lambda: random_model.engine.num_running == 8)
            assert random_model.http.post(TEXT, json={"prompt": [1]}).status_code == 429
        random_model.settle()


def test_short_texts_and_ids_do_not_wait_for_long_texts(letters, monkeypatch):
    """Two texts of megabytes held both threads of the tokenizer for ten seconds; token ids waited there too."""
    words, released = letters.service._intake._words, threading.Event()
    encode = words.encode

    def slow(text, *how):
        return encode(text, *how) if len(text) < 1 << 16 else released.wait(DEADLINE) and encode("a")

    monkeypatch.setattr(words, "encode", slow)
    long = [letters.send(TEXT, prompt="a" * (1 << 17), max_tokens=3) for _ in range(4)]
    try:
        until(lambda: any(thread.name.startswith("tokenizer") for thread in threading.enumerate()))
        assert letters.text("a", max_tokens=3) == letters.text([97], max_tokens=3) == "bcd"
        assert not released.is_set()
    finally:
        released.set()
    for sock in long:
        with sock:
            assert b'"bcd"' in read_until(sock, lambda data: b"}}" in data)


def test_events_leave_one_by_one(letters, monkeypatch):
    """Each step waits until an event of an earlier one has come: behind a layer that buffers, the third would wait in vain."""
    step, may, in_vain = letters.engine.step, threading.Semaphore(3), []

    def held():
        if not in_vain and not may.acquire(timeout=DEADLINE):
            in_vain.append(1)
        return step()

    monkeypatch.setattr(letters.engine, "step", held)
    with letters.http.stream("POST", TEXT, json=dict(prompt="A", stream=True, max_tokens=100)) as response:
        came = [may.release() for line in response.iter_lines() if '"text":"A"' in line]
    assert len(came) == 100
    assert not in_vain
