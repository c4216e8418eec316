"""Owns the typed reading of JSON objects from a model folder. Does not own what the fields mean (config, rope)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import CheckpointError

T = TypeVar("T")
D = TypeVar("D")

LIMITS = {int: 2**31 - 1, float: 1e30}
"""The largest number that may stand in a file; no honest one comes near."""

KINDS = {
    int: "a whole number above 0 and below 2^31",
    float: "a number above 0 and up to 1e30",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Fields:
    """A JSON object whose values are asked for by type; a wrong one is a CheckpointError that names file and field.

    Args:
        data: the object; null counts as absent.
        where: what to call it in messages, e.g. "config.json".
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """The object in a JSON file.

        Raises:
            CheckpointError: the file is not there, cannot be read, or holds no JSON object.
        """
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path.parent} has no {path.name}; a model folder needs one") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {one_line(error)}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return cls(data, str(path))

    def need(self, name: str, kind: type[T]) -> T:
        """The value of a field, a number above 0 and within LIMITS; a whole float may stand for an int, an int for a float."""
        value = self.data.get(name)
        if value is None:
            raise CheckpointError(f"{self.where}: {name} is missing")
        right = type(value) is kind or (kind is float and type(value) is int)
        right = right or (kind is int and type(value) is float and value.is_integer())
        if not right or (kind in LIMITS and not 0 < value <= LIMITS[kind]):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; it must be {KINDS[kind]}")
        return kind(value)  # type: ignore[call-arg]

    def get(self, name: str, kind: type[T], default: D) -> T | D:
        """As `need`, or `default` where the field is absent."""
        return default if self.data.get(name) is None else self.need(name, kind)

    def token_ids(self, name: str) -> list[int]:
        """One id, a list of ids, or none."""
        value = self.data.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in values):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; it must be a token id or a list of them")
        return values


def one_line(error: BaseException) -> str:
    """What an error of a library says, in a line that is not too long."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def short(value: Any) -> str:
    """A value as it stands in a message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
