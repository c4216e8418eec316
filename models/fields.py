"""Owns the typed reading of JSON objects from a model folder: a wrong type is one sentence that names file and field.

Does not own what the fields mean (config, rope).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError


class Fields:
    """A JSON object whose values are asked for by type. null counts as absent.

    Args:
        data: the object.
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
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return cls(data, str(path))

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{self.where}: {name} is {value!r}; it must be a whole number of at least {least}")
        return value

    def optional_integer(self, name: str, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None where the field is absent or null."""
        return None if self.data.get(name) is None else self.integer(name, least=least)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; it must be a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number above zero, or None where the field is absent or null."""
        return None if self.data.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; it must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; it must be a string")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """An object; empty where the field is absent or null."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; it must be an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.data.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; it must be a token id or a list of them")
        return tuple(values)

    def _get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: {name} is missing")
        return value
