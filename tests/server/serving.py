"""Runs servers for tests in this process, on a thread, so that a test can look at the engine; and talks to any server."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from models import find_model, load_engine, load_tokenizer
from runtime.config import EngineConfig
from runtime.engine import Engine
from server.app import Service, Settings, create_app
from server.serve import bind, http_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RUNTIME = "/v1/runtime"
DEADLINE = 60.0
"""Seconds for what should take none: a test waits this long on a stalled machine, and no right run comes near."""


@dataclass
class Client:
    """Talks to one server."""

    port: int
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A whole completion's body."""
        response = self.http.post(TEXT, json={"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return strict(response.content)

    def text(self, prompt: Any, **fields: Any) -> str:
        """The text of a completion's only choice."""
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """A stream's events, without the [DONE] that ends it."""
        response = self.http.post(path, json={"stream": True, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.content)

    def refusal(self, path: str = TEXT, content: bytes | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and error object of a request that must fail, in small strict JSON."""
        response = self.http.post(path, json=fields) if content is None else self.http.post(path, content=content)
        assert response.status_code >= 400, response.text
        return response.status_code, error_of(response)

    def connect(self) -> socket.socket:
        """A raw connection."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))  # close resets
        return sock

    def send(self, path: str, **fields: Any) -> socket.socket:
        """A raw connection with a request on its way."""
        sock = self.connect()
        sock.sendall(raw_request(path, json.dumps(fields).encode()))
        return sock


@dataclass
class Local(Client):
    """A server on a thread of this process."""

    engine: Engine
    service: Service
    loop: asyncio.AbstractEventLoop

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine on the server's event loop."""
        asyncio.run_coroutine_threadsafe(work, self.loop)

    def settle(self) -> None:
        """Wait until no request is left anywhere."""
        until(lambda: self.service.dispatcher._calls == {} and not self.engine.has_work)


def strict(data: bytes) -> dict[str, Any]:
    """Parse JSON that holds no NaN or Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data, parse_constant=refuse)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a refusal."""
    assert len(response.content) < 10_000
    body = strict(response.content)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]


def parse_events(content: bytes) -> list[dict[str, Any]]:
    """The objects of a finished event stream, checked for its form."""
    text = content.decode()  # every byte is UTF-8
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    assert events.count("data: [DONE]") == 1
    return [strict(event.removeprefix("data: ").encode()) for event in events[:-1]]


def counts(usage: dict[str, Any]) -> list[int]:
    """Prompt, completion and total tokens: what does not depend on what ran before."""
    return [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]


def texts_of(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    """The text of each event of a choice, chat or completion; closing chunks give an empty one."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]


def finishes_of(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    """Every reason to end that a choice's events tell."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def raw_request(path: str, body: bytes, length: str | None = None, method: str = "POST", headers: str = "") -> bytes:
    """Bytes of a request, whose Content-Length may lie."""
    head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {length or len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def read_until(sock: socket.socket, found: Any) -> bytes:
    """Read until `found(bytes so far)` holds or the server closes."""
    data = b""
    while not found(data) and (part := sock.recv(65536)):
        data += part
    return data


def until(condition: Any, seconds: float = DEADLINE) -> None:
    """Wait for a condition."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.002)


@contextmanager
def slow_steps(engine: Engine, seconds: float = 0.01) -> Iterator[None]:
    """Steps that take so long that no client on a busy machine is overtaken by the answer it counts on."""
    step = engine.step
    engine.step = lambda: time.sleep(seconds) or step()
    try:
        yield
    finally:
        engine.step = step


@contextmanager
def local_server(
    model: Path | str,
    settings: dict[str, Any] | None = None,
    text: bool = True,
    send_buffer: int | None = None,
    edit: Callable[[Engine], None] = lambda engine: None,
    state: str = "ready",
    **config: Any,
) -> Iterator[Local]:
    """A model served on a thread of this process, in float32 unless `config` says otherwise.

    Args:
        text: False serves as a model without a tokenizer is served: answers are ids.
        send_buffer: bytes the kernel takes of an answer that nobody reads.
        edit: what to do to the engine before the server starts.
        state: what the server must have come to when the `with` begins.
    """
    wanted = EngineConfig(**{"device": "cpu", "dtype": "float32", **config})
    source = find_model(str(model))
    loaded = load_engine(source, wanted, tokenizer=load_tokenizer(source) if text else None)
    edit(loaded.engine)
    chosen = Settings(**{"names": ("test", "alias"), **(settings or {})})
    service = Service(loaded, chosen)
    with bind("127.0.0.1", 0) as sock:
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = http_server(create_app(service, chosen))
        loop = uvloop.new_event_loop()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.serve([sock]))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            until(lambda: server.started and service.dispatcher.state == state)
            client = Local(sock.getsockname()[1], loaded.engine, service, loop)
            with client.http:
                yield client
        finally:
            server.should_exit = True
            thread.join()
