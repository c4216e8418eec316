"""Owns the order of a reply, whole or streamed: what is sent when, until the answers, the engine or the client end it.

Does not own the objects' form (shapes) or the text (answer).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from runtime.errors import QuartetError
from runtime.request import FinishReason
from server.answer import Answer
from server.dispatch import Call, Dispatcher
from server.errors import INTERNAL, ClientGoneError, GenerationError, encode, error_object
from server.intake import Job
from server.schema import StreamOptions
from server.shapes import Envelope, Usage

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0
"""How long a client may leave a full connection unread before it counts as gone."""

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Piece:
    """What one token adds to choice `index`."""

    index: int
    text: str
    finish: FinishReason | None
    first: bool


class Times:
    """When a request's tokens came; seconds of time.monotonic."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.first: float | None = None
        self.last = began

    def token(self, at: float) -> None:
        self.first = self.first or at
        self.last = at


class Reply:
    """An ASGI response that runs a job and sends what it gives: whole, or as a stream with what `options` ask for."""

    def __init__(self, dispatcher: Dispatcher, job: Job, envelope: Envelope, stream: bool, options: StreamOptions) -> None:
        self._dispatcher = dispatcher
        self._job = job
        self._envelope = envelope
        self._streamed = stream
        self._options = options
        self._started: set[int] = set()  # choices that have shown something

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply.

        Raises:
            QuartetError: before anything was sent; later errors become the stream's last event.
        """
        state = scope["state"]
        times, gone, call = Times(state["began"]), False, None
        try:
            with self._dispatcher.submit(self._job.requests) as call:
                watch = asyncio.create_task(_watch(receive, call))
                try:
                    await (self._stream(call, times, send) if self._streamed else self._whole(call, times, send))
                finally:
                    watch.cancel()
        except ClientGoneError:
            gone = True
        finally:
            if call is not None:
                state["logged"] = True
                self._log(state["request_id"], call, times, "cancelled" if gone else "error")

    @property
    def _usage(self) -> Usage:
        return Usage(self._job.prompt_tokens, sum(answer.tokens for answer in self._job.answers))

    async def _pieces(self, call: Call, times: Times) -> AsyncIterator[Piece]:
        """Each token's piece until every choice has ended. Tokens behind a stop string are dropped and counted nowhere."""
        answers: Sequence[Answer] = self._job.answers
        growing = len(answers)
        while growing:
            arrival = await call.next()
            answer, event = answers[arrival.index], arrival.event
            if answer.finish is not None:
                continue
            if event.token is None:
                raise GenerationError(event.message or "the request was cancelled")
            times.token(arrival.at)
            text = answer.push(event.token, event.finish)
            if answer.finish is not None:
                growing -= 1
                if event.finish is None:
                    self._dispatcher.cancel(call.ids[arrival.index])
            first = arrival.index not in self._started
            if text or answer.finish is not None:
                self._started.add(arrival.index)
                yield Piece(arrival.index, text, answer.finish, first)

    async def _whole(self, call: Call, times: Times, send: Send) -> None:
        texts = [""] * len(self._job.answers)
        async for piece in self._pieces(call, times):
            texts[piece.index] += piece.text
        choice = self._envelope.shape.choice
        choices = [choice(index, texts[index], answer.finish) for index, answer in enumerate(self._job.answers)]
        body = encode(self._envelope.whole(choices, self._usage))
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, call: Call, times: Times, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for piece in self._pieces(call, times):
                for chunk in self._chunks(piece):
                    await _send_event(send, chunk)
            if self._options.include_usage:
                await _send_event(send, {**self._envelope.chunk([]), "usage": self._usage.object()})
        except ClientGoneError:
            raise
        except QuartetError as error:
            log.warning("a stream ends with an error: %s", error)
            await _send_event(send, error_object(error))
        except Exception:  # ours to fix, and the client must hear of it all the same
            log.exception("a stream ends with an error of ours")
            await _send_event(send, error_object(INTERNAL))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece's events: a token with its text; the length's end rides on it, a stop has an empty chunk of its own."""
        delta = self._envelope.shape.delta
        if piece.finish != "stop":
            deltas = [delta(piece.index, piece.text, piece.finish, piece.first)]
        elif piece.text:
            deltas = [delta(piece.index, piece.text, None, piece.first), delta(piece.index, "", "stop", False)]
        else:
            deltas = [delta(piece.index, "", "stop", piece.first)]
        chunks = [self._envelope.chunk([each]) for each in deltas]
        if self._options.include_usage:
            usage = self._usage.object() if self._options.continuous_usage_stats else None
            chunks = [{**chunk, "usage": usage} for chunk in chunks]
        return chunks

    def _log(self, request_id: str, call: Call, times: Times, unfinished: FinishReason) -> None:
        """The request's one line; `unfinished` says what became of answers without an end."""
        usage = self._usage
        queue_ms = 1e3 * ((call.admitted or time.monotonic()) - call.submitted)
        first_ms = "-" if times.first is None else f"{1e3 * (times.first - times.began):.1f}"
        gaps = max(answer.tokens for answer in self._job.answers) - 1
        per_token_ms = "-" if times.first is None or gaps < 1 else f"{1e3 * (times.last - times.first) / gaps:.2f}"
        log.info(
            "request %s prompt_tokens=%d completion_tokens=%d queue_ms=%.1f first_token_ms=%s per_token_ms=%s finish=%s",
            *(request_id, usage.prompt_tokens, usage.completion_tokens, queue_ms, first_ms, per_token_ms),
            ",".join(dict.fromkeys(answer.finish or unfinished for answer in self._job.answers)),
        )


async def _send_event(send: Send, data: dict[str, Any]) -> None:
    """One server-sent event.

    Raises:
        ClientGoneError: the connection is full and the client does not read.
    """
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": b"data: " + encode(data) + b"\n\n", "more_body": True})
    except TimeoutError:
        raise ClientGoneError(f"the client has read nothing for {SEND_SECONDS:.0f} s") from None


async def _watch(receive: Receive, call: Call) -> None:
    """Wait for the client to go away, and let the reply know at once."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.fail(ClientGoneError("the client went away"), at_once=True)
