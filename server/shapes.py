"""Owns the names and nesting of replies: OpenAI's objects for completions and chats. Does not own their order."""

from dataclasses import dataclass
from typing import Any

from runtime.request import FinishReason


@dataclass(frozen=True)
class Usage:
    """What a request has cost so far."""

    prompt_tokens: int
    completion_tokens: int

    def object(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


class CompletionShape:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """A whole choice."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: FinishReason | None, first: bool) -> dict[str, Any]:
        """A piece of a choice; `first` marks the choice's first piece, and no text is an empty delta."""
        return self.choice(index, text, finish)


class ChatShape:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: FinishReason | None, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


Shape = CompletionShape | ChatShape


@dataclass(frozen=True)
class Envelope:
    """What stays the same over one reply."""

    shape: Shape
    id: str
    created: int
    model: str

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """A reply that is not streamed."""
        return {**self._head(self.shape.object), "choices": choices, "usage": usage.object()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        return {**self._head(self.shape.chunk_object), "choices": choices}

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self.shape.id_prefix + self.id, "object": object, "created": self.created, "model": self.model}
