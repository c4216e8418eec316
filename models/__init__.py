"""Checkpoints and what becomes of them: config, weights, tokenizer, and the decoder as data.

A name is imported at its first use: this file runs before the door `python -m models` does, and torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.decoder import Decoder
    from models.load import Loaded, load_engine, load_model, load_tokenizer
    from models.source import ModelSource, find_model
    from models.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "Decoder",
    "Detokenizer",
    "Loaded",
    "ModelConfig",
    "ModelSource",
    "Tokenizer",
    "find_model",
    "load_engine",
    "load_model",
    "load_tokenizer",
]

_HOMES = {"ModelConfig": "config", "Decoder": "decoder", "Detokenizer": "tokenizer", "Tokenizer": "tokenizer"}
_HOMES |= {"ModelSource": "source", "find_model": "source"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'load')}"), name)
