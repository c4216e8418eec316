"""Owns `random:` models: public shapes, and seeded weights made on the device. Does not own checkpoints on disk."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from models.config import ModelConfig
from models.layout import EMBEDDING, Piece, part
from models.rope import RopeConfig

PREFIX = "random:"
SEED = 0

_LLAMA3 = RopeConfig("llama3", 500000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
_MILLION = RopeConfig(theta=1e6)

SHAPES = {
    "llama-2-7b": ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5),
    "llama-3.1-8b": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, _LLAMA3),
    "mistral-7b": ModelConfig("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, _MILLION),
    "mistral-7b-v0.1": ModelConfig("mistral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, window=4096),
    "qwen2.5-7b": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, _MILLION, qkv_bias=True),
    "qwen3-8b": ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e-6, _MILLION, qk_norm=True),
}
"""The models' public config.json files; mistral-7b is v0.3."""


def fill_randomly(targets: dict[str, Tensor], table: list[Piece], advance: Callable[[int], None]) -> None:
    """Fill the decoder's tensors: linears N(0, 1.5/sqrt(fan_in)), embeddings N(0, 1), norms U(0.5, 1.5), biases N(0, 0.5).

    `advance` is told the bytes filled. The same device, dtype and shapes give the same weights. The usual 0.02 would leave
    attention almost flat.
    """
    generator = torch.Generator(next(iter(targets.values())).device).manual_seed(SEED)
    for piece in table:
        target = part(targets, piece)
        if piece.source == EMBEDDING:
            target.normal_(generator=generator)
        elif piece.source.endswith(".bias"):
            target.normal_(std=0.5, generator=generator)
        elif len(piece.shape) == 1:
            target.uniform_(0.5, 1.5, generator=generator)
        else:
            target.normal_(std=1.5 / math.sqrt(piece.shape[1]), generator=generator)
        advance(target.nbytes)
