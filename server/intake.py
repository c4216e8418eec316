"""Owns the way from a typed request to what the engine takes and what its tokens become: ids, end ids, one Answer a choice.

Does not validate fields (schema) and does not talk HTTP.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from models import Tokenizer
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.request import MAX_END_IDS, Request, require_ids
from server.answer import Answer, IdText, StopMatcher
from server.schema import ChatRequest, CompletionRequest, GenerationRequest, SamplingDefaults, TokenizeRequest

T = TypeVar("T")

LONG_CHARACTERS = 1 << 16
"""Longer texts are made ids of one after another, so that of the executor's two threads one is left to all others."""
MAX_SPECIAL = 64
"""Characters of a control token's spelling, at most."""


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready for the engine: choice i is requests[i], told by answers[i]; `choices` of them share a prompt."""

    requests: list[Request]
    answers: list[Answer]
    choices: int
    prompt_tokens: int


class Intake:
    """Makes jobs.

    Args:
        engine: asked what it would refuse, never driven.
        tokenizer: None for a model without one, which takes and gives ids only.
        end_ids: ids that end an answer unless a request ignores them.
        defaults: sampling values of requests that set none.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, end_ids: Sequence[int], defaults: SamplingDefaults) -> None:
        self._engine = engine
        self._words = tokenizer or IdText()
        self._end_ids = tuple(token for token in end_ids if token < engine.model.vocab_size)
        self._defaults = defaults
        self._long = asyncio.Semaphore(1)
        self._numbers = itertools.count()
        self._spell = lru_cache(maxsize=1 << 16)(self._words.spelling)
        self._shown = lru_cache(maxsize=1 << 16)(self._in_text)

    async def completion(self, wanted: CompletionRequest) -> Job:
        """Raises RequestError for what can never run here."""
        prompts = [
            (prompt, "")
            if isinstance(prompt, list) and not wanted.echo
            else await self._apart(len(prompt), self._prompt, prompt, wanted.echo)
            for prompt in wanted.prompt
        ]
        return self._job(wanted, prompts, wanted.logprobs if wanted.echo else None)

    async def chat(self, wanted: ChatRequest) -> Job:
        """Raises RequestError for what can never run here, a template's refusal included."""
        return self._job(wanted, [(await self._encode_chat(wanted.flatten()), "")])

    async def tokenize(self, wanted: TokenizeRequest) -> list[int]:
        """Ids of a text or a chat. Raises RequestError: there is no tokenizer, or the template refuses."""
        if wanted.prompt is not None:
            return await self._apart(len(wanted.prompt), self._words.encode, wanted.prompt, wanted.add_special_tokens)
        return await self._encode_chat([message.flatten(index) for index, message in enumerate(wanted.messages or ())])

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included. Raises RequestError for ids outside of the vocabulary."""
        require_ids(ids, self._engine.model.vocab_size, "tokens")
        return await self._apart(len(ids), self._words.decode, ids, False)

    async def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return await self._apart(sum(len(message["content"]) for message in messages), self._words.encode_chat, messages)

    async def _apart(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Do what takes long for a text or ids of some size, where the event loop does not wait for it."""
        async with self._long if size > LONG_CHARACTERS else nullcontext():
            return await asyncio.to_thread(work, *args)

    def _prompt(self, prompt: str | list[int], echo: bool) -> tuple[list[int], str]:
        """A prompt's ids, and what to show of it."""
        if isinstance(prompt, list):
            known = echo and all(0 <= token < self._engine.model.vocab_size for token in prompt)
            return prompt, self._words.decode(prompt, False) if known else ""
        return self._words.encode(prompt), prompt if echo else ""

    def _job(self, wanted: GenerationRequest, prompts: list[tuple[list[int], str]], scored: int | None = None) -> Job:
        special = self._special_stops(wanted.stop)
        own_ends = () if wanted.ignore_eos else self._end_ids
        ends = tuple(dict.fromkeys([*own_ends, *wanted.stop_token_ids, *special]))
        if len(ends) > MAX_END_IDS:
            asked, room = len({*wanted.stop_token_ids, *special}), MAX_END_IDS - len(own_ends)
            what = "stop_token_ids" if not special else "stop_token_ids and control tokens in stop"
            raise RequestError(f"{what} name {asked} ids; at most {room} fit beside the model's own end ids", "stop_token_ids")
        seed = random.getrandbits(63)
        job = Job([], [], wanted.n, sum(len(ids) for ids, _ in prompts))
        for ids, echo in prompts:
            for _ in range(wanted.n):
                choice = len(job.requests)
                request = Request(
                    id=str(next(self._numbers)),
                    prompt_ids=tuple(ids),
                    params=wanted.sampling(self._defaults, seed, choice),
                    max_tokens=1 if wanted.limit == 0 else wanted.limit,
                    min_tokens=wanted.min_tokens,
                    end_ids=ends,
                    prompt_logprobs=scored,
                )
                if choice % wanted.n == 0:
                    self._engine.check(request)
                job.requests.append(request)
                job.answers.append(self._answer(wanted, ids, echo, special))
        return job

    def _answer(self, wanted: GenerationRequest, ids: list[int], echo: str, special: dict[int, str]) -> Answer:
        return Answer(
            detokenizer=self._words.stream(ids),
            matcher=StopMatcher(wanted.stop, wanted.include_stop_str_in_output),
            min_tokens=wanted.min_tokens,
            end_texts=special if wanted.include_stop_str_in_output else {},
            spell=None if wanted.alternatives is None else self._spell,
            prompt=ids,
            echo=echo,
            scores_only=wanted.limit == 0,
            shown=self._shown,
        )

    def _in_text(self, token: int) -> bool:
        """Whether an id has a place in an answer's text, which a control token has not."""
        probe = [] if isinstance(self._words, IdText) else self._words.encode("a")
        return self._words.decode([*probe, token, *probe]) != self._words.decode(probe + probe)

    def _special_stops(self, stops: Sequence[str]) -> dict[int, str]:
        """Stops that are spelled like a control token: it is never part of the text, so it must be found as an id."""
        words = self._words
        if isinstance(words, IdText) or not stops:
            return {}
        frame, probe = words.encode(""), words.encode("a")
        found = {}
        for stop in stops:
            ids = words.encode(stop)[len(frame) :] if len(stop) <= MAX_SPECIAL else []
            if len(ids) == 1 and words.decode(probe + ids + probe) == words.decode(probe + probe):
                found[ids[0]] = stop
        return found
