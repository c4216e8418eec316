"""Owns strict validation: no coercion, null is absent, and complaints in the API's words. Does not own the fields (schema)."""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from runtime.errors import RequestError

FORMS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string, a list of strings or null",
    "content": "a string or a list of text parts",
}
"""What fields of several forms may be."""

WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


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
            return cls.model_validate(body)
        except ValidationError as error:
            raise explain(error) from None


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
    if kind == "greater_than_equal":
        rule = f"{context['ge']} or above"
    elif kind == "less_than_equal":
        rule = f"at most {context['le']}"
    elif kind == "too_short":
        rule = "a list with at least one entry"
    elif kind == "literal_error":
        rule = f"one of {context['expected']}"
    else:
        rule = WORDS.get(kind, "valid")
    where = ".".join(str(step) for step in first["loc"])
    return RequestError(f"{where} is {_short(first['input'])}; it must be {rule}", where)


def _short(value: Any) -> str:
    """A value as JSON, cut to what fits a sentence."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
