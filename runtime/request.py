"""Owns what goes into the engine and what comes out: token ids and plain values. Does not own text or tensors.

Everything here is picklable, so that a process boundary could stand where today a thread does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_END_IDS = 16
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 logits."""

MAX_LOGPROBS = 20
"""Alternatives that can be asked for beside a token's own log-probability, as OpenAI's `top_logprobs`."""


def require_ids(ids: Sequence[int], vocab_size: int, param: str | None = None) -> None:
    """Raises RequestError for a token id outside the vocabulary; `param` names the field that holds it."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:  # many ids, and on a server's event loop
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"token id {token} is outside the vocabulary of 0 to {vocab_size - 1}", param)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn, in this order: penalties (repetition, then frequency and presence), logit_bias,
    temperature, top_k, top_p on what is left renormalised, min_p.

    Attributes:
        temperature: divides the logits; below 1e-5 the draw is greedy (ties go to the lowest id).
        top_k: keep the k largest logits; 0 or -1 keeps all.
        top_p: keep the smallest set of largest probabilities that reaches top_p, the crossing one included; 1 keeps all.
        min_p: keep probabilities of at least min_p times the largest; 0 keeps all.
        seed: fixes the random numbers, whatever else runs beside; any 64-bit integer.
        choice: which of several answers to the same prompt this is; part of the random numbers' key.
        repetition_penalty: divides positive and multiplies other logits of ids in the prompt or the answer (arXiv 1909.05858).
        presence_penalty, frequency_penalty: taken from the logits of ids in the answer, once and for each time (OpenAI).
        logit_bias: (id, value) pairs added to the logits.
        logprobs: None, or how many alternatives are told with each token beside its own value. They are the log-softmax of the
            model's logits as they are, before everything above.

    Raises:
        RequestError: a value outside these ranges; `param` names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; it must be a finite number, 0 or above", "temperature")
        for name, low, high in (
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise RequestError(f"{name} is {value}; it must lie between {low} and {high}", name)
        if self.top_k < -1:
            raise RequestError(f"top_k is {self.top_k}; it must be -1 or 0 (off) or above", "top_k")
        if not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; it must fit in 64 bits", "seed")
        for token, value in self.logit_bias:
            if not -100 <= value <= 100:
                raise RequestError(f"logit_bias of id {token} is {value}; it must lie between -100 and 100", "logit_bias")
        if len(dict(self.logit_bias)) != len(self.logit_bias):
            raise RequestError("logit_bias names a token id twice; name each once", "logit_bias")
        _check_logprobs(self.logprobs, "logprobs")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether any of top_k, top_p, min_p can drop a token."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on which ids came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check_logprobs(wanted: int | None, name: str) -> None:
    if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
        raise RequestError(f"{name} is {wanted}; it must lie between 0 and {MAX_LOGPROBS}", name)


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: unique among the requests in the engine.
        prompt_ids: at least one token id, each inside the vocabulary (the engine checks).
        params: how tokens are drawn.
        max_tokens: tokens to produce at most; None runs to the end of the context, and so does a value past it. At least one is
            always produced: whoever wants a prompt scored and nothing else asks for 1 and drops it.
        min_tokens: tokens before which no end id can be drawn.
        end_ids: ids that end the answer, at most 16; the id itself is produced and counted.
        cached: prompt tokens, from the first on, whose K and V lie in every slot already; prefill begins behind them. For those
            who fill the cache themselves, in an engine without prefix reuse.
        prompt_logprobs: None, or how many alternatives are told with each prompt token beside its own log-probability. Needs
            the whole prompt computed: `cached` must be 0, and no prefix is reused.

    Raises:
        RequestError: empty prompt, one that is cached to its end, counts outside their ranges, or more than 16 end ids.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    cached: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        if not 0 <= self.cached < len(self.prompt_ids):
            raise RequestError(f"cached is {self.cached}; it must be 0 or above and leave one of {len(self.prompt_ids)} tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 1 or above", "max_tokens")
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be 0 or above", "min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens")
        if len(self.end_ids) > MAX_END_IDS:
            raise RequestError(f"{len(self.end_ids)} end ids given; at most {MAX_END_IDS} are allowed", "stop_token_ids")
        _check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        if self.prompt_logprobs is not None and self.cached:
            raise RequestError(f"cached is {self.cached} and prompt_logprobs asked for; they need the whole prompt: cached 0")


@dataclass(frozen=True)
class Logprobs:
    """What the model thought of one token, before penalties, bias, temperature and filters: the log-softmax of its logits.

    Attributes:
        logprob: the token's own; -Infinity where the model's logit is.
        top: (id, logprob) of the best, as many as were asked for and the vocabulary has; falling, the lower id first of equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenEvent:
    """What the engine tells of one request in one step.

    Attributes:
        request_id: whose token it is.
        token: the id produced, or None when the event only ends the request (cancelled, error).
        finish: why the request ended with this event, or None while it runs.
        message: what went wrong, with finish "error".
        logprobs: the token's, where the request asked.
        prompt_logprobs: with the request's first token, where it asked: one for each prompt token, None for the first of them.
        cached: with a token, how many of its request's prompt tokens were found in the cache and not computed.
    """

    request_id: str
    token: int | None
    finish: FinishReason | None = None
    message: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    cached: int = 0
