"""Owns one choice's way from tokens to text: detokenizing, stop strings, its end. Does not know HTTP or the engine."""

from collections.abc import Mapping
from typing import Protocol

from runtime.request import FinishReason
from server.stops import StopMatcher


class Detokenizer(Protocol):
    """Turns a growing row of ids into text; what is not yet a whole character is held back."""

    def push(self, ids: list[int], /) -> str:
        """The text that these ids complete."""

    def flush(self) -> str:
        """What was held back, as well as it can be shown."""


class IdText:
    """Stands in for a tokenizer where a model has none: an id's text is a space and its number."""

    def push(self, ids: list[int], /) -> str:
        return "".join(f" {token}" for token in ids)

    def flush(self) -> str:
        return ""


class Answer:
    """One choice as it grows.

    Args:
        detokenizer: fed with the produced ids only; it knows the prompt.
        matcher: looks for stop strings in the produced text.
        min_tokens: the text of this many tokens is shown without looking for stops.
        end_texts: ids that end the answer and whose text is shown all the same.

    Attributes:
        tokens: tokens produced so far, the one that ended the answer included.
        finish: why it ended, or None while it grows.
    """

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int, end_texts: Mapping[int, str]) -> None:
        self.tokens = 0
        self.finish: FinishReason | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._end_texts = end_texts

    def push(self, token: int, finish: FinishReason | None) -> str:
        """Take the next token and the engine's verdict on it; the text to show for it, often empty at the end."""
        assert self.finish is None
        self.tokens += 1
        if finish == "stop":
            text = self._detokenizer.flush()
        else:
            text = self._detokenizer.push([token])
            if finish == "length":
                text += self._detokenizer.flush()
        if self.tokens > self._min_tokens:
            text = self._matcher.push(text)
        self.finish = "stop" if self._matcher.found else finish
        if self.finish is not None:
            text += self._matcher.flush()
        if finish == "stop":
            text += self._end_texts.get(token, "")
        return text
