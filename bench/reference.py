"""Owns Hugging Face's logits for given ids, in float32 and in the run's dtype, eager attention: what rule N compares with.

Does not own the rule (rule_n) or how a Hugging Face model is made (hf_model).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import hf_model
from bench.rule_n import Verdict, rule_n
from models.decoder import Decoder


@dataclass(frozen=True)
class Reference:
    """Hugging Face's logits `[T, V]` float32 on the host; same_dtype is None in a float32 run.

    Attributes:
        how: where its weights came from, in words.
    """

    float32: Tensor
    same_dtype: Tensor | None
    how: str

    def judge(self, ours: Tensor) -> Verdict:
        """Rule N for our logits `[T, V]`."""
        return rule_n(ours, self.float32, self.same_dtype)


def reference(ids: Sequence[int], path: Path | None, decoder: Decoder) -> Reference:
    """Play the ids through Hugging Face on the decoder's device, one model at a time.

    Args:
        path: the checkpoint's folder, which transformers reads itself; None (random weights) takes the decoder's weights.
    """

    def make(dtype: torch.dtype) -> Any:
        if path is None:
            return hf_model.around(decoder, None, dtype, "eager")
        return hf_model.read_folder(path, dtype, decoder.device, "eager")

    exact = _logits(make(torch.float32), ids, decoder.device)
    rounded = None if decoder.dtype == torch.float32 else _logits(make(decoder.dtype), ids, decoder.device)
    return Reference(exact, rounded, "transformers read the folder" if path is not None else "transformers over our weights")


@torch.inference_mode()
def _logits(hf: Any, ids: Sequence[int], device: torch.device) -> Tensor:
    logits = hf(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]  # [T, V]
    return logits.float().cpu()  # type: ignore[no-any-return]
