"""Owns the fields of the API: a JSON object becomes a typed request or a RequestError. Does not know engine or tokenizer.

Null means absent everywhere but inside lists. Unknown fields are ignored (their names go to the debug log); fields that are
known, not built and would change the answer are refused with code `unsupported_parameter`.
"""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PlainValidator

from runtime.errors import RequestError
from runtime.request import SamplingParams
from server.errors import UnsupportedParameterError
from server.strict import Strict

log = logging.getLogger(__name__)

MAX_STOPS = 16
MAX_CHOICES = 128

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "prompt_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that are not built, and their values that change nothing."""

NEUTRAL_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that leaves a field out is sampled with: the model's generation_config.json, else these, the API's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def _as_stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_prompts(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt as one list."""
    several = isinstance(value, list) and value and type(value[0]) is not int
    prompts: list[Any] = value if several else [value]
    for prompt in prompts:
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))):
            raise ValueError
    return prompts


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict):
    """The fields that both endpoints share."""

    default_max_tokens: ClassVar[int | None]

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[list[str], FailFast(), BeforeValidator(_as_stops)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Raises as Strict.parse, and UnsupportedParameterError: a field that is not built and would change the answer."""
        request = super().parse(body)
        request.check(body)
        unknown = body.keys() - cls.model_fields.keys() - NEUTRAL.keys()
        if unknown:
            log.debug("ignored unknown fields: %s", ascii(sorted(unknown))[:200])
        return request

    def check(self, body: dict[str, Any]) -> None:
        """What types alone cannot say. Raises as `parse`."""
        for name, neutral in NEUTRAL.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
                raise UnsupportedParameterError(f"{name} is not supported; leave it out", name)
        for name, off in NEUTRAL_PENALTIES.items():
            if getattr(self, name) != off:
                raise UnsupportedParameterError(f"{name} is not supported; leave it out or at {off:g}", name)
        if "" in self.stop:
            raise RequestError("stop holds an empty string, which would end every answer at once", "stop")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} entries; at most {MAX_STOPS} are allowed", "stop")
        self.sampling(SamplingDefaults(), 0, 0)

    @property
    def limit(self) -> int | None:
        """Tokens to produce at most; of the two names the newer wins. None: to the end of the context."""
        return self.max_completion_tokens or self.max_tokens or self.default_max_tokens

    def sampling(self, defaults: SamplingDefaults, seed: int, choice: int) -> SamplingParams:
        """How choice number `choice` is drawn; `seed` is for a request that brings none.

        Raises:
            RequestError: a value out of range.
        """
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=seed if self.seed is None else self.seed,
            choice=choice,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    default_max_tokens = 16

    prompt: Annotated[list[str | list[int]], PlainValidator(_as_prompts)]
    """One text or list of ids for each prompt."""


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[dict[str, Any]], FailFast(), BeforeValidator(_as_parts)]
    name: str | None = None
    tool_calls: list[Any] = Field(default_factory=list)

    def flatten(self, index: int) -> dict[str, str]:
        """What a chat template reads; text parts are joined by line breaks.

        Raises:
            RequestError: a part that is not text.
        """
        texts = []
        for part in self.content:
            if part.get("type") != "text":
                raise UnsupportedParameterError(f"message {index} holds a part that is not text; send text alone", "messages")
            if not isinstance(part.get("text"), str):
                raise RequestError(f"message {index} holds a text part without a text", "messages")
            texts.append(part["text"])
        if self.tool_calls:
            raise UnsupportedParameterError(f"message {index} holds tool calls, which are not supported", "messages")
        flat = {"role": self.role, "content": "\n".join(texts)}
        return flat if self.name is None else {**flat, "name": self.name}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    default_max_tokens = None

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]

    def check(self, body: dict[str, Any]) -> None:
        super().check(body)
        self.flatten()

    def flatten(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them."""
        return [message.flatten(index) for index, message in enumerate(self.messages)]


class SwitchRequest(Strict):
    """POST /v1/runtime. A field that is left out keeps what is."""

    model_config = ConfigDict(extra="forbid")

    ops: Literal["fused", "unfused"] | None = None
    graph: Literal["on", "off"] | None = None
