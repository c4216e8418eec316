"""Owns the way from a typed request to what the engine takes and what its tokens become: ids, end ids, one Answer a choice.

Does not validate fields (schema) and does not talk HTTP.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from models import Tokenizer
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.request import Request
from server.answer import Answer, IdText, StopMatcher
from server.schema import ChatRequest, CompletionRequest, GenerationRequest, SamplingDefaults

TOKENIZER_THREADS = 2
MAX_SPECIAL = 64
"""Characters of a control token's spelling, at most."""


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready for the engine: choice i is requests[i], told by answers[i]."""

    requests: list[Request]
    answers: list[Answer]
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
        self._tokenizer = tokenizer
        self._end_ids = tuple(token for token in end_ids if token < engine.model.vocab_size)
        self._defaults = defaults
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")
        self._numbers = itertools.count()

    async def completion(self, wanted: CompletionRequest) -> Job:
        """Raises RequestError for what can never run here."""
        return self._job(wanted, [await self._ids(prompt) for prompt in wanted.prompt])

    async def chat(self, wanted: ChatRequest) -> Job:
        """Raises RequestError for what can never run here, a template's refusal included."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer and no chat template; send ids to /v1/completions", "messages")
        encode_chat, messages = self._tokenizer.encode_chat, wanted.flatten()
        ids = await asyncio.get_running_loop().run_in_executor(self._pool, encode_chat, messages)
        return self._job(wanted, [ids])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; send the prompt as token ids", "prompt")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._tokenizer.encode, prompt)

    def _job(self, wanted: GenerationRequest, prompts: list[list[int]]) -> Job:
        special = self._special_stops(wanted.stop)
        own_ends = () if wanted.ignore_eos else self._end_ids
        ends = tuple(dict.fromkeys([*own_ends, *wanted.stop_token_ids, *special]))
        seed = random.getrandbits(63)
        job = Job([], [], sum(map(len, prompts)))
        for ids in prompts:
            for _ in range(wanted.n):
                choice = len(job.requests)
                request = Request(
                    id=str(next(self._numbers)),
                    prompt_ids=tuple(ids),
                    params=wanted.sampling(self._defaults, seed, choice),
                    max_tokens=wanted.limit,
                    min_tokens=wanted.min_tokens,
                    end_ids=ends,
                )
                if choice % wanted.n == 0:
                    self._engine.check(request)
                job.requests.append(request)
                job.answers.append(self._answer(wanted, ids, special))
        return job

    def _answer(self, wanted: GenerationRequest, ids: list[int], special: dict[int, str]) -> Answer:
        detokenizer = IdText() if self._tokenizer is None else self._tokenizer.stream(ids)
        include = wanted.include_stop_str_in_output
        return Answer(detokenizer, StopMatcher(wanted.stop, include), wanted.min_tokens, special if include else {})

    def _special_stops(self, stops: Sequence[str]) -> dict[int, str]:
        """Stops that are spelled like a control token: it is never part of the text, so it must be found as an id."""
        if self._tokenizer is None:
            return {}
        frame, probe = self._tokenizer.encode(""), self._tokenizer.encode("a")
        found = {}
        for stop in stops:
            ids = self._tokenizer.encode(stop)[len(frame) :] if len(stop) <= MAX_SPECIAL else []
            if len(ids) == 1 and self._tokenizer.decode(probe + ids + probe) == self._tokenizer.decode(probe + probe):
                found[ids[0]] = stop
        return found
