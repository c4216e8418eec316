"""Owns one choice's way from tokens to text: detokenizing, the search for stop strings, its end, what is told of each token.

Does not know HTTP or the engine, which ends at stop token ids itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models import Detokenizer
from runtime.errors import RequestError
from runtime.request import FinishReason, Logprobs, TokenEvent
from server.shapes import Mark


class IdText:
    """Stands in for a tokenizer where a model has none: an id's text is a space and its number, and no text has ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise RequestError("this model has no tokenizer; send the prompt as token ids", "prompt")

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        raise RequestError("this model has no tokenizer and no chat template; send ids to /v1/completions", "messages")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in ids)

    def spelling(self, token: int) -> bytes:
        return f" {token}".encode()

    def stream(self, prompt_ids: Sequence[int]) -> "IdText":
        return self

    push = decode

    def flush(self) -> str:
        return ""


class StopMatcher:
    """Passes text on until a stop string appears, holding back only what may yet become one.

    Of several stops the one that is complete first wins; of those complete at the same character, the longest. The outcome does
    not depend on how the text is cut into pieces.

    Args:
        stops: non-empty strings; none passes everything.
        include: whether the found stop belongs to the text. Then nothing is ever held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.found = False
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is safe to show now. Once `found` is set nothing more may be pushed."""
        assert not self.found
        if not self._patterns:
            return text
        seen = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [len(pattern.stop) for pattern in self._patterns if pattern.advance(char)]
            if complete:
                self.found, self._held = True, ""
                return seen[:end] if self._include else seen[: end - max(complete)]
        safe = len(seen) if self._include else len(seen) - max(pattern.matched for pattern in self._patterns)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """What was held back, once it is known that no more text follows."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth, Morris and Pratt's automaton of one stop string: a step a character, however long or repetitive the string. It is
    built as far as it was matched: most are never met, and a request may bring megabytes."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text ends with now
        self._border = [0]  # length of the longest proper prefix of stop[: i + 1] that is also its suffix

    def advance(self, char: str) -> bool:
        """Take one character; whether the stop is complete with it."""
        self.matched = self._longer(self.matched, char)
        if self.matched > len(self._border):
            self._border.append(self._longer(self._border[-1], char))
        return self.matched == len(self.stop)

    def _longer(self, matched: int, char: str) -> int:
        """How much of the stop a text ends with that ended with `matched` characters of it, behind one more."""
        while matched and self.stop[matched] != char:
            matched = self._border[matched - 1]
        return matched + (self.stop[matched] == char)


@dataclass(eq=False)
class Answer:
    """One choice as it grows.

    Attributes:
        detokenizer: fed with the produced ids only; it knows the prompt.
        matcher: looks for stop strings in the produced text.
        min_tokens: the text of this many tokens is shown without looking for stops.
        end_texts: ids that end the answer and whose text is shown all the same.
        spell: an id's bytes, where log-probabilities are told.
        prompt: ids that are scored with the first token, where it asks for that.
        echo: text in front of the answer.
        shown: whether an id has a place in the text; control tokens have none.
        scores_only: the one token that the engine must produce is shown and counted nowhere.
        tokens: tokens produced so far, the one that ended the answer included.
        cached: prompt tokens that were found in the cache.
        finish: why it ended, or None while it grows.
        first_at, last_at: when its tokens came, seconds of time.monotonic; None before the first.
    """

    detokenizer: Detokenizer | IdText
    matcher: StopMatcher
    min_tokens: int
    end_texts: Mapping[int, str]
    spell: Callable[[int], bytes] | None
    prompt: Sequence[int]
    echo: str
    scores_only: bool
    shown: Callable[[int], bool] = lambda token: True
    tokens: int = 0
    cached: int = 0
    finish: FinishReason | None = None
    first_at: float | None = None
    last_at: float | None = None
    _marks: list[Mark] = field(default_factory=list)
    _offset: int = 0

    def push(self, event: TokenEvent) -> str:
        """Take the next token and the engine's verdict on it; the text to show for it, often empty at the end."""
        assert self.finish is None
        assert event.token is not None
        self.cached = event.cached
        for token, scored in zip(self.prompt, event.prompt_logprobs or (), strict=False):
            self._mark(token, scored, shown=True)
        echo, self.echo = self.echo, ""
        if self.scores_only:
            self.finish = "length"
            return echo
        self.tokens += 1
        if event.logprobs is not None:
            self._mark(event.token, event.logprobs, self.shown(event.token))
        return echo + self._text(event.token, event.finish)

    def take_marks(self) -> list[Mark] | None:
        """What is to be told of the tokens since the last call; None where nothing was asked for."""
        if self.spell is None:
            return None
        marks, self._marks = self._marks, []
        return marks

    def _text(self, token: int, finish: FinishReason | None) -> str:
        if finish == "stop":
            text = self.detokenizer.flush()
        else:
            text = self.detokenizer.push([token])
            if finish == "length":
                text += self.detokenizer.flush()
        if self.tokens > self.min_tokens:
            text = self.matcher.push(text)
        self.finish = "stop" if self.matcher.found else finish
        if self.finish is not None:
            text += self.matcher.flush()
        if finish == "stop":
            text += self.end_texts.get(token, "")
        return text

    def _mark(self, token: int, scored: Logprobs | None, shown: bool) -> None:
        assert self.spell is not None
        spelling, spell = self.spell(token), self.spell
        top = () if scored is None else tuple((spell(other), logprob) for other, logprob in scored.top)
        self._marks.append(Mark(spelling, None if scored is None else scored.logprob, top, self._offset))
        self._offset += shown and sum(byte & 0xC0 != 0x80 for byte in spelling)  # characters begin with such a byte
