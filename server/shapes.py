"""Owns the names, types and nesting of replies, OpenAI's for completions and chats. Does not own their order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import TypedDict  # pydantic reads that of typing from Python 3.12 on

from runtime.request import FinishReason

LEAST_LOGPROB = -9999.0
"""JSON has no -Infinity; so says vLLM."""

Ends = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """What a request has cost so far; prompt tokens are counted once for all answers to one prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Ends | None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Ends | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Chat(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    status: Literal["ok"]
    running: int
    waiting: int


class Version(TypedDict):
    version: str


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(TypedDict):
    prompt: str


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorBody


def usage(prompt: int, completion: int, cached: int) -> Usage:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True)
class Mark:
    """A token as `logprobs` tells it.

    Attributes:
        spelling: the bytes that it stands for; with half a character they are no text.
        logprob: None for the first token of a prompt.
        top: spelling and log-probability of the likeliest tokens.
        offset: characters of text before it.
    """

    spelling: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What one token adds to choice `index`; or a whole choice.

    Attributes:
        marks: None where none were asked for.
        first: whether it is the choice's first.
    """

    index: int
    text: str
    finish: FinishReason | None
    marks: Sequence[Mark] | None
    first: bool


@dataclass(frozen=True)
class Envelope:
    """What stays the same over one reply."""

    id: str
    created: int
    model: str

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def whole(self, choices: list[dict[str, Any]], used: Usage) -> dict[str, Any]:
        """A reply that is not streamed."""
        return {**self._head(self.object), "choices": choices, "usage": used}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        return {**self._head(self.chunk_object), "choices": choices}

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self.id_prefix + self.id, "object": object, "created": self.created, "model": self.model}


class CompletionEnvelope(Envelope):
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def choice(self, whole: Piece) -> dict[str, Any]:
        """A whole choice."""
        logprobs: CompletionLogprobs | None = None
        if (marks := whole.marks) is not None:
            logprobs = {
                "tokens": [_name(mark.spelling) for mark in marks],
                "token_logprobs": [None if mark.logprob is None else max(mark.logprob, LEAST_LOGPROB) for mark in marks],
                "top_logprobs": [None if mark.logprob is None else _by_name(mark.top) for mark in marks],
                "text_offset": [mark.offset for mark in marks],
            }
        return {"index": whole.index, "text": whole.text, "logprobs": logprobs, "finish_reason": whole.finish}

    delta = choice  # a piece has the same form


class ChatEnvelope(Envelope):
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, whole: Piece) -> dict[str, Any]:
        return self._with("message", {"role": "assistant", "content": whole.text}, whole)

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A piece of a choice; no text is an empty delta."""
        role = {"role": "assistant"} if piece.first else {}
        return self._with("delta", {**role, "content": piece.text} if role or piece.text else {}, piece)

    def _with(self, name: str, content: dict[str, str], piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.marks)
        return {"index": piece.index, name: content, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, marks: Sequence[Mark] | None) -> ChatLogprobs | None:
        if marks is None:
            return None
        content: list[TokenLogprob] = []
        for mark in marks:
            assert mark.logprob is not None  # prompts are told by completions alone
            content.append({**_top(mark.spelling, mark.logprob), "top_logprobs": [_top(*each) for each in mark.top]})
        return {"content": content}


def _name(spelling: bytes) -> str:
    """A token's text; half a character is told by its bytes, as two such tokens must not have one name."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _by_name(top: Sequence[tuple[bytes, float]]) -> dict[str, float]:
    named: dict[str, float] = {}
    for spelling, logprob in top:
        named.setdefault(_name(spelling), max(logprob, LEAST_LOGPROB))  # of two ids with one text the likelier counts
    return named


def _top(spelling: bytes, logprob: float) -> TopLogprob:
    return {"token": spelling.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(spelling)}
