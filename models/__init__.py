"""Checkpoints and what becomes of them: config, weights, tokenizer, and the decoder as data."""

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
