"""Owns the seam: the seven calls that play a decode step, and `load_ops`, the only toggle between ways to play them.

Does not know the engine or the model: ops are handed tensors. Every ops set reads and writes the same KV cache, so a running
stream can change sets between two steps.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.errors import ConfigError


@dataclass(frozen=True)
class Linear:
    """A projection as stored: weight `[out, in]` and bias `[out]` or None. A value, so that scales and formats can join it."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of one decode step. `slots [B]` int32, -1 for an idle row (reads and writes no cache); `positions [B]` int32,
    the index of the token being written (keys seen = position + 1)."""

    slots: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Attention:
    """What one layer's attention is made of.

    Attributes:
        heads, kv_heads, head_dim: H, K, D; query head h reads KV head h // (H // K).
        eps: of every RMSNorm of the layer.
        cos, sin: `[S, D/2]` float32 rotary tables, Hugging Face's half-split order, any attention factor multiplied in.
        q_norm, k_norm: `[D]` weights of the per-head RMSNorm before the rotation, or None.
        window: a query at p sees keys > p - window; None sees all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class Ops(Protocol):
    """One way to play a decode step. x is `[B, C]` in the run's dtype; sums are float32, rounded once."""

    name: str

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """ids `[B]`, table `[V, C]` -> x `[B, C]`."""

    def norm_qkv_rope(
        self, x: Tensor, norm: Tensor, qkv: Linear, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """x `[B, C]` -> q `[B, H, D]`; k and v go to (slot, position) of the caches `[slots, K, S, D]`. What has been done to
        q by then is private to the ops set."""

    def attention(self, q: Tensor, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q `[B, H, D]` -> `[B, H*D]`. Idle rows give zeros. After it the caches hold normed, rotated K, and V."""

    def proj_residual(self, a: Tensor, proj: Linear, x: Tensor) -> Tensor:
        """a `[B, in]`, x `[B, C]` -> x + proj(a) `[B, C]`."""

    def norm_gate_up(self, x: Tensor, norm: Tensor, gate_up: Linear, eps: float) -> Tensor:
        """x `[B, C]` -> silu(gate(norm x)) * up(norm x) `[B, F]`; gate's rows come first in `gate_up`."""

    def norm_lm_head(self, x: Tensor, norm: Tensor, lm_head: Linear, eps: float) -> Tensor:
        """x `[B, C]` -> logits `[B, V]` float32, never rounded."""


def load_ops(name: str) -> Ops:
    """The ops set called `name`.

    Raises:
        ConfigError: no such set.
    """
    if name == "unfused":
        from runtime.ops.unfused import UnfusedOps

        return UnfusedOps()
    raise ConfigError(f"ops is {name!r}; allowed: unfused")
