"""Owns the order of a reply, whole or streamed: what is sent when, until the answers, the engine or the client end it.

Does not own the objects' form (shapes) or the text (answer).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from runtime.errors import QuartetError
from runtime.request import FinishReason
from server.answer import Answer
from server.dispatch import Call, Dispatcher
from server.errors import INTERNAL, ClientGoneError, GenerationError, encode, error_object
from server.intake import Job
from server.logs import tell
from server.metrics import Metrics
from server.schema import StreamOptions
from server.shapes import ChatEnvelope, CompletionEnvelope, Mark, Piece, Usage, usage

log = logging.getLogger(__name__)

STAND_IN = "\0"
"""A text to be replaced in an event's JSON."""

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(eq=False)
class Reply:
    """An ASGI response that runs a job and sends what it gives: whole, or as a stream with what `options` ask for."""

    dispatcher: Dispatcher
    metrics: Metrics
    job: Job
    envelope: CompletionEnvelope | ChatEnvelope
    streamed: bool
    options: StreamOptions
    _began: float = 0.0  # seconds of time.monotonic, as all times here
    _started: set[int] = field(default_factory=set)  # choices that have shown something
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # what stands before and behind a choice's text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply.

        Raises:
            QuartetError: before anything was sent; later errors become the stream's last event.
        """
        state = scope["state"]
        self._began, gone, call = state["began"], False, None
        try:
            with self.dispatcher.submit(self.job.requests) as call:
                watch = asyncio.create_task(_watch(receive, call))
                try:
                    await (self._stream(call, send) if self.streamed else self._whole(call, send))
                finally:
                    watch.cancel()
        except ClientGoneError:
            gone = True
        finally:
            if call is not None:
                state["logged"] = True
                self._tell(call, "cancelled" if gone else "error")

    def _usage(self) -> Usage:
        answers = self.job.answers
        cached = sum(answer.cached for answer in answers[:: self.job.choices])
        return usage(self.job.prompt_tokens, sum(answer.tokens for answer in answers), cached)

    async def _pieces(self, call: Call) -> AsyncIterator[Piece]:
        """Each token's piece until every choice has ended. Tokens behind a stop string are dropped and counted nowhere."""
        answers: Sequence[Answer] = self.job.answers
        growing = len(answers)
        while growing:
            index, event, at = await call.next()
            answer = answers[index]
            if answer.finish is not None:
                continue
            if event.token is None:
                raise GenerationError(event.message or "the request was cancelled")
            text = answer.push(event)
            self._measure(call, index, at)
            if answer.finish is not None:
                growing -= 1
                if event.finish is None:
                    self.dispatcher.cancel(call.ids[index])
            if text or answer.finish is not None:
                first = index not in self._started
                self._started.add(index)
                yield Piece(index, text, answer.finish, answer.take_marks(), first)

    def _measure(self, call: Call, index: int, at: float) -> None:
        """Take down when an answer's token came, and what that says."""
        metrics, answer = self.metrics, self.job.answers[index]
        if answer.first_at is None:
            admitted = call.admitted.get(index, at)
            metrics.queue(admitted - call.submitted)
            metrics.prefill(at - admitted)
            metrics.first_token(at - self._began)
            if index % self.job.choices == 0:
                metrics.prompt_tokens(len(self.job.requests[index].prompt_ids))
                metrics.cached_tokens(answer.cached)
            answer.first_at = at
        else:
            assert answer.last_at is not None
            metrics.inter_token(at - answer.last_at)
        answer.last_at = at
        metrics.generation_tokens(answer.tokens > 0)
        if answer.finish is not None:
            metrics.decode(at - answer.first_at)
            metrics.end_to_end(at - self._began)

    async def _whole(self, call: Call, send: Send) -> None:
        texts = [""] * len(self.job.answers)
        marks: list[list[Mark]] = [[] for _ in texts]
        scored = False
        async for piece in self._pieces(call):
            texts[piece.index] += piece.text
            if piece.marks is not None:
                scored = True
                marks[piece.index] += piece.marks
        choice = self.envelope.choice
        choices = [
            choice(Piece(index, texts[index], answer.finish, marks[index] if scored else None, first=True))
            for index, answer in enumerate(self.job.answers)
        ]
        body = encode(self.envelope.whole(choices, self._usage()))
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, call: Call, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for piece in self._pieces(call):
                for event in self._events(piece):
                    await _send_event(send, event)
            if self.options.include_usage:
                await _send_event(send, encode({**self.envelope.chunk([]), "usage": self._usage()}))
        except ClientGoneError:
            raise
        except QuartetError as error:
            log.warning("a stream ends with an error: %s", error)
            await _send_event(send, encode(error_object(error)))
        except Exception:  # ours to fix, and the client must hear of it all the same
            log.exception("a stream ends with an error of ours")
            await _send_event(send, encode(error_object(INTERNAL)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _events(self, piece: Piece) -> list[bytes]:
        """A piece's events in JSON. Most differ in their text alone, and what stands around that is encoded once a choice."""
        if piece.first or piece.finish is not None or piece.marks is not None or self.options.continuous_usage_stats:
            return [encode(chunk) for chunk in self._chunks(piece)]
        if piece.index not in self._around:
            [chunk] = self._chunks(replace(piece, text=STAND_IN))
            before, _, after = encode(chunk).rpartition(encode(STAND_IN))
            self._around[piece.index] = before, after
        before, after = self._around[piece.index]
        return [before + encode(piece.text) + after]

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece's events: a token with its text; the length's end rides on it, a stop has an empty chunk of its own."""
        pieces = [piece]
        if piece.finish == "stop" and piece.text:
            end = replace(piece, text="", marks=None if piece.marks is None else [], first=False)
            pieces = [replace(piece, finish=None), end]
        chunks = [self.envelope.chunk([self.envelope.delta(each)]) for each in pieces]
        if self.options.include_usage:
            used = self._usage() if self.options.continuous_usage_stats else None
            chunks = [{**chunk, "usage": used} for chunk in chunks]
        return chunks

    def _tell(self, call: Call, unfinished: FinishReason) -> None:
        """The request's one line; `unfinished` says what became of answers without an end."""
        used, answers = self._usage(), self.job.answers
        reasons = [answer.finish or unfinished for answer in answers]
        for reason in reasons:
            self.metrics.ended(reason)
        began = [answer.first_at for answer in answers if answer.first_at is not None]
        ended = [answer.last_at for answer in answers if answer.last_at is not None]
        gaps = max(answer.tokens for answer in answers) - 1
        admitted = min(call.admitted.values(), default=time.monotonic())
        tell(
            log,
            "request",
            prompt_tokens=used["prompt_tokens"],
            cached_tokens=used["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=used["completion_tokens"],
            queue_ms=round(1e3 * (admitted - call.submitted), 1),
            first_token_ms=round(1e3 * (min(began) - self._began), 1) if began else None,
            per_token_ms=round(1e3 * (max(ended) - min(began)) / gaps, 2) if began and gaps > 0 else None,
            finish=",".join(dict.fromkeys(reasons)),
        )


async def _send_event(send: Send, data: bytes) -> None:
    """One server-sent event."""
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def _watch(receive: Receive, call: Call) -> None:
    """Wait for the client to go away, and let the reply know at once."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.fail(ClientGoneError("the client went away"), at_once=True)
