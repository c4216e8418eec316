"""Owns the fields of the API: a JSON object becomes a typed request or a RequestError. Does not know engine or tokenizer.

Null means absent everywhere but inside lists. Unknown fields are ignored (their names go to the debug log); fields that are
known, not built and would change the answer are refused with code `unsupported_parameter`.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field

from runtime.errors import RequestError
from runtime.request import MAX_LOGPROBS, SamplingParams
from server.errors import UnsupportedParameterError
from server.strict import MAX_STOPS, Bias, Content, Prompts, Stops, Strict

log = logging.getLogger(__name__)

MAX_CHOICES = 128

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "chat_template", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "functions", "guided_choice", "tools"), ([],)),
    **dict.fromkeys(("continue_final_message", "echo", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("prompt_logprobs", "top_logprobs"), (0,)),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
}
"""Fields that are not built, and their values that change nothing; a request type that has one of them as a field checks it."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that leaves a field out is sampled with: the model's generation_config.json, else these, the API's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict):
    """The fields that both endpoints share."""

    default_max_tokens: ClassVar[int | None]

    model: str | None = Field(None, description="A name that GET /v1/models lists; absent: the first of them.")
    max_tokens: int | None = Field(None, ge=1, description="Answers are cut at the end of the context all the same.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens; it wins over it.")
    min_tokens: int = Field(0, ge=0, description="Tokens before which nothing ends the answer but its length.")
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, description="Below 0.00001 the draw is greedy. The first filter of the draw.")
    top_k: int | None = Field(None, ge=-1, description="The second; 0 and -1 are off.")
    top_p: float | None = Field(None, ge=0, le=1, description="The third, on what top_k leaves.")
    min_p: float | None = Field(None, ge=0, le=1, description="The last.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Of tokens in the prompt or the answer.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Of tokens in the answer.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Of tokens in the answer, for each time.")
    logit_bias: Bias = ()
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Fixes the draw, whatever else runs.")
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Raises as Strict.parse, and UnsupportedParameterError: a field that is not built and would change the answer."""
        for name, neutral in NEUTRAL.items():
            value = body.get(name)
            if value is None or name in cls.model_fields or any(type(value) is type(n) and value == n for n in neutral):
                continue
            raise UnsupportedParameterError(f"{name} is not supported; leave it out", name)
        request = super().parse(body)
        unknown = body.keys() - cls.model_fields.keys() - NEUTRAL.keys()
        if unknown:
            log.debug("ignored unknown fields: %s", ascii(sorted(unknown))[:200])
        return request

    def check(self) -> None:
        if "" in self.stop:
            raise RequestError("stop holds an empty string, which would end every answer at once", "stop")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} entries; at most {MAX_STOPS} are allowed", "stop")
        self.sampling(SamplingDefaults(), 0, 0)

    @property
    def limit(self) -> int | None:
        """Tokens to produce at most; of the two names the newer wins. None: to the end of the context."""
        given = (self.max_completion_tokens, self.max_tokens, self.default_max_tokens)
        return next((limit for limit in given if limit is not None), None)

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are told with each token and its log-probability; None tells neither."""
        raise NotImplementedError

    def sampling(self, defaults: SamplingDefaults, seed: int, choice: int) -> SamplingParams:
        """How choice number `choice` is drawn; `seed` is for a request that brings none.

        Raises:
            RequestError: a value out of range.
        """
        pairs = {name: (getattr(self, name), default) for name, default in asdict(defaults).items()}
        return SamplingParams(
            **{name: default if given is None else given for name, (given, default) in pairs.items()},
            seed=seed if self.seed is None else self.seed,
            choice=choice,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            logprobs=self.alternatives,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    default_max_tokens = 16

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, description="Default 16. 0 with echo scores the prompt.")
    echo: bool = Field(False, description="Put the prompt in front of the answer.")
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives to each token; of the model itself, before anything of the draw."
    )

    def check(self) -> None:
        super().check()
        if self.limit == 0 and not self.echo:
            raise RequestError("max_tokens is 0; it must be 1 or above, or 0 with echo to score a prompt", "max_tokens")

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_calls: list[Any] = Field(default_factory=list, json_schema_extra={"maxItems": 0})

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
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="Alternatives to each token; needs logprobs.")

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs} and logprobs is off; set logprobs to true", "top_logprobs")
        self.flatten()

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def flatten(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them."""
        return [message.flatten(index) for index, message in enumerate(self.messages)]


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or a chat as its template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    add_special_tokens: bool = Field(True, description="Of a prompt; chats get what their template writes.")

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


class SwitchRequest(Strict):
    """POST /v1/runtime. A field that is left out keeps what is."""

    model_config = ConfigDict(extra="forbid")

    ops: Literal["fused", "unfused"] | None = None
    graph: Literal["on", "off"] | None = None
