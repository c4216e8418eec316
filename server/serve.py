"""Owns the socket, uvicorn's settings and the way down on a signal. Does not own routes or flags."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from httptools import HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from runtime.errors import ConfigError, QuartetError
from server.dispatch import Dispatcher
from server.errors import encode, nested

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection in their pools: the server must not close one that a client is about to use."""
MAX_HEADER_BYTES = 1 << 16
MAX_PIPELINED, MAX_PIPELINED_BYTES = 16, 8 << 20
"""Requests of a connection that are read while another one of it runs, and bytes of their bodies; the rest waits in the
network's buffers, and behind it the client's end."""
SEND_SECONDS = 60.0
"""How long a client may leave a full connection unread before it counts as gone."""
FRAMING = (b"content-length", b"transfer-encoding")
"""What says where a body ends."""
LAST_WORDS_SECONDS = 1
"""How long finished answers may take to reach their clients after draining."""


class _Parser(HttpRequestParser):
    """httptools' parser for a protocol that takes no offer of another one, such as the h2c of Java's client and curl --http2:
    httptools leaves what follows such a head, a body too, to the other protocol."""

    def __init__(self, protocol: "Protocol") -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        parser: HttpRequestParser = self
        while True:
            try:
                return HttpRequestParser.feed_data(parser, data)
            except HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                parser = self._protocol.decline()


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP with refusals in the API's form, an end to headers, bodies behind offers of another protocol, and
    disconnects told to pipelined requests too, and no patience without end for clients that do not read."""

    _cycles: Sequence[Any] = ()
    _muted = False  # while a head that is known is read again
    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.parser = _Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        """uvicorn waits without end for a first request, and for the rest of a head."""
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def decline(self) -> HttpRequestParser:
        """Read on as if the head had offered nothing; what reads on."""
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in FRAMING]
        self.parser, self._muted = _Parser(self), True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        self._muted = False
        return self.parser

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body is still to come
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._muted:
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _without_chunks(self.cycle)
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        self._read_on()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._read_on()

    def _read_on(self) -> None:
        """uvicorn stops at the first request that waits, and so would not hear of the client's end."""
        waiting = [cycle for cycle, _ in self.pipeline]
        if waiting and len(waiting) <= MAX_PIPELINED and sum(len(cycle.body) for cycle in waiting) <= MAX_PIPELINED_BYTES:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(0)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._patience is not None:
            self._patience.cancel()

    def _await_reader(self, left_before: int) -> None:
        """Let the connection end if as many bytes are left as SEND_SECONDS ago."""
        left = self.transport.get_write_buffer_size()
        if left == left_before:
            log.info("a client has read nothing for %g s; its connection ends", SEND_SECONDS)
            self.transport.abort()
        else:
            self._patience = self.loop.call_later(SEND_SECONDS, self._await_reader, left)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        self.pipeline.clear()
        for cycle in self._cycles:  # uvicorn itself tells the newest alone, which may not be the one that runs
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if not self._muted:
            super().on_message_begin()
            self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            self._count(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._muted:
            self._count(name + value)
            super().on_header(name, value)

    def _count(self, part: bytes) -> None:
        self._header_bytes += len(part)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser makes a 400 of it

    def eof_received(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.send_400_response("the body is shorter than its Content-Length")

    def send_400_response(self, msg: str) -> None:
        told = f"{msg.rstrip('.')}; a body needs a Content-Length that is right, or chunks"
        body = encode(nested(told, "invalid_request_error", "bad_request"))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            self.transport.write(STATUS_LINE[400] + head + body)  # else it would stand in the middle of an answer
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks, which uvicorn sends all the same: a body of unknown length ends with the connection."""
    send = cycle.send

    async def plain(message: Any) -> None:
        cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: they would close the port before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Take a port without opening it: connections are refused until `listen`.

    Raises:
        ConfigError: it is taken, or the address is not this machine's.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = info[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address of this machine: {error.strerror}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        return sock
    except OSError as error:
        sock.close()
        raise _taken(host, port, error) from None


def listen(sock: socket.socket) -> None:
    """Open a bound port.

    Raises:
        ConfigError: another process took it in the meantime.
    """
    try:
        sock.listen(2048)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _taken(host, port, error) from None


def http_server(app: ASGIApp) -> uvicorn.Server:
    """uvicorn around an app. asyncio and uvloop set TCP_NODELAY themselves: a token's bytes leave at once."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
    )
    return _Server(config)


async def serve(app: ASGIApp, dispatcher: Dispatcher, sock: socket.socket, shutdown_timeout: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the process at once.

    Raises:
        QuartetError: the engine could not start.
    """
    server = http_server(app)

    def on_signal(number: int) -> None:
        if dispatcher.leaving.is_set():
            os._exit(128 + number)
        log.info("draining for up to %g s; a second signal ends at once", shutdown_timeout)
        dispatcher.leaving.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    leaving = asyncio.create_task(dispatcher.leaving.wait())
    await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    await dispatcher.drain(shutdown_timeout)
    server.should_exit = True
    await running
    if dispatcher.start_failure is not None:
        raise QuartetError(dispatcher.start_failure)


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"host {host!r} is not an address of this machine; 0.0.0.0 listens on all that are")
    return ConfigError(f"cannot use port {port} of {host}: {error.strerror}; stop what holds it or choose another --port")
