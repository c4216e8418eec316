"""Owns strict validation: no coercion, null is absent, fields of several forms, and complaints in the API's words.

Does not own the fields (schema).
"""

import json
import re
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from runtime.errors import RequestError

MAX_STOPS = 16

FORMS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string, a list of strings or null",
    "content": "a string or a list of text parts",
    "logit_bias": "an object from token ids to numbers between -100 and 100",
}
"""What fields of several forms may be."""

WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "{ge} or above",
    "int_type": "an integer",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "model_type": "an object",
    "string_type": "a string",
    "too_short": "a list with at least one entry",
}
"""What a value must be, by pydantic's name of its complaint; in braces what pydantic adds to it."""


class Strict(BaseModel):
    """No coercion; null counts as absent; unknown keys pass."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Validate a request's body.

        Raises:
            RequestError: a field of the wrong type, out of range or missing; `param` names it.
        """
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise explain(error) from None
        request.check()
        return request

    def check(self) -> None:
        """What types alone cannot say. Raises as `parse`."""


def explain(error: ValidationError) -> RequestError:
    """The first of pydantic's complaints in the API's words."""
    first = error.errors(include_url=False)[0]
    path = [str(step) for step in first["loc"][: 3 if first["loc"][0] == "messages" else 1]]
    where, kind, context = ".".join(path), first["type"], first.get("ctx", {})
    if kind == "missing":
        return RequestError(f"{where} is missing", where)
    if kind == "extra_forbidden":
        return RequestError(f"{_short(where)} is no field of this request")
    if path[-1] in FORMS:
        return RequestError(f"{where} must be {FORMS[path[-1]]}", where)
    where = ".".join(str(step) for step in first["loc"])
    told = {name: int(word) if isinstance(word, float) and word.is_integer() else word for name, word in context.items()}
    return RequestError(f"{where} is {_short(first['input'])}; it must be {WORDS.get(kind, 'valid').format(**told)}", where)


def _short(value: Any) -> str:
    """A value as JSON, cut to what fits a sentence."""
    try:
        text = json.dumps(value)
    except RecursionError:  # deeper by some levels than what just could be read
        return "nested too deeply"
    return text if len(text) <= 60 else text[:60] + "..."


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt as one list."""
    several = isinstance(value, list) and value and type(value[0]) is not int
    prompts: list[Any] = value if several else [value]
    for prompt in prompts:
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))):
            raise ValueError
    return prompts


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """JSON's names are strings; these are token ids."""
    if not (isinstance(value, dict) and all(re.fullmatch("[0-9]{1,9}", token) for token in value)):
        raise ValueError
    if not all(type(bias) in (int, float) and abs(bias) <= 100 for bias in value.values()):
        raise ValueError
    return tuple((int(token), float(bias)) for token, bias in value.items())


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": _TEXT}, "required": ["type", "text"]}
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_STOP = {"type": "string", "minLength": 1}

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema({"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]}),
]
Bias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_bias),
    WithJsonSchema({"type": "object", "patternProperties": {"^[0-9]{1,9}$": _BIAS}, "additionalProperties": False}),
]
Stops = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
Content = Annotated[
    list[dict[str, Any]],
    FailFast(),
    BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART}]}),
]
