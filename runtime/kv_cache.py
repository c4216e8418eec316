"""Owns the K and V tensors, their byte cost and how many positions fit. Does not know who holds which slot (scheduler)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import ConfigError, OutOfMemoryError

RESERVE_BYTES = 1 << 30
"""Left free beside weights and cache: activations of a prefill chunk, logits, the CUDA context and its libraries."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, normed and rotated: k and v are `[slots, K, S, D]`."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer and slot: k and v are `[L, slots, K, S, D]` in the run's dtype."""

    k: Tensor
    v: Tensor

    @classmethod
    def allocate(
        cls, layers: int, slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Make an empty cache of `capacity` positions a slot.

        Raises:
            OutOfMemoryError: the device cannot hold it.
        """
        shape = (layers, slots, kv_heads, capacity, head_dim)
        try:
            return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            size = 2 * layers * slots * kv_heads * capacity * head_dim * dtype.itemsize
            raise OutOfMemoryError(
                f"the KV cache of {slots} slots of {capacity} positions needs {size / 1e9:.2f} GB, which the device "
                "does not have; lower --max-len or --max-slots"
            ) from error

    @property
    def capacity(self) -> int:
        """Positions a slot can hold (S)."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of every layer from one slot to another, in stream order."""
        for cache in (self.k, self.v):
            cache[:, target, :, :length].copy_(cache[:, source, :, :length])

    def layers(self) -> list[LayerCache]:
        """A view of each layer."""
        return [LayerCache(k, v) for k, v in zip(self.k.unbind(0), self.v.unbind(0), strict=True)]


def fit_max_len(
    wanted: int | None, model_limit: int | None, max_slots: int, bytes_per_position: int, weight_bytes: int, free: int
) -> int:
    """Positions a slot can hold beside the weights, decided before a byte is loaded.

    Args:
        wanted: the user's max_len, met exactly or refused; None takes what fits.
        model_limit: the checkpoint's limit; None when the weights are random and have none.
        bytes_per_position: K and V of one position over all layers.
        weight_bytes: the weights as they will lie on the device.
        free: bytes free before loading.

    Raises:
        OutOfMemoryError: weights alone, or weights and the wanted cache, do not fit; the figures are in the message.
    """
    if wanted is not None and model_limit is not None and wanted > model_limit:
        raise ConfigError(f"max_len {wanted} is above the model's limit of {model_limit} positions; lower --max-len")
    left = free - weight_bytes - RESERVE_BYTES
    figures = f"{free / 1e9:.2f} GB free, weights {weight_bytes / 1e9:.2f} GB, {RESERVE_BYTES / 1e9:.2f} GB kept in reserve"
    fits = left // (bytes_per_position * max_slots)
    if fits < 2:
        raise OutOfMemoryError(f"the model does not fit: {figures}; free memory, or use a smaller model or dtype")
    if wanted is not None and wanted > fits:
        need = wanted * max_slots * bytes_per_position
        raise OutOfMemoryError(
            f"the KV cache does not fit: {max_slots} slots of {wanted} positions need {need / 1e9:.2f} GB; {figures}; "
            f"at most {fits} positions fit, or lower --max-slots"
        )
    return wanted or min(model_limit or 4096, fits)
