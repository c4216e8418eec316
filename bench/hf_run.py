"""Owns Hugging Face transformers as a contender of the latency bench: its eager forward, token by token, with a dynamic cache.

Does not own how its model is made (hf_model) or the clock (timing).
"""

from typing import Any

import torch

from bench.hf_model import cache_argument
from bench.timing import Shape


class TransformersRun:
    """A transformers model played as a streaming user sees it: each step's greedy tokens are brought to the host.

    Args:
        hf: a causal LM of transformers in eval mode.
        device: where it lies.
    """

    ops = "transformers"
    graph = "off"

    def __init__(self, hf: Any, device: torch.device) -> None:
        self._hf = hf
        self._device = device
        self._cache_argument = cache_argument(hf)
        self._cache: Any = None
        self._ids = torch.empty(0)
        self._streams: list[int] = []

    @torch.inference_mode()
    def prepare(self, shape: Shape, seed: int) -> None:
        from transformers import DynamicCache

        config = self._hf.config
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(config.vocab_size, (shape.batch, shape.prompt_len), generator=generator)
        self._streams = list(range(shape.batch))
        self._cache = DynamicCache(config=config)
        if shape.depth:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            size = (shape.batch, config.num_key_value_heads, shape.depth, head_dim)
            for layer in range(config.num_hidden_layers):
                k, v = (torch.randn(size, dtype=self._hf.dtype, device=self._device) for _ in range(2))
                self._cache.update(k, v, layer)
        self._synchronize()

    def submit(self) -> None:
        self._ids = self._ids.to(self._device)

    @torch.inference_mode()
    def advance(self) -> list[int]:
        arguments = {"input_ids": self._ids, self._cache_argument: self._cache, "use_cache": True, "logits_to_keep": 1}
        tokens = self._hf(**arguments).logits[:, -1].argmax(dim=-1)  # [B]
        tokens.tolist()  # the wait for the device, as for a user who reads them
        self._ids = tokens[:, None]
        return self._streams

    def finish(self) -> None:
        self._cache = None
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
