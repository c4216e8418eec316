"""Owns the seam: the six calls that play a decode step, and `load_ops`, the only toggle between ways to play them.

Does not know the engine or the model: ops are handed tensors. Every ops set reads and writes the same KV cache, so a running
stream can change sets between two steps.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from runtime.ops.fp8 import Fp8
    from runtime.ops.lowbit import LowBit

OPS_SETS = ("fused", "unfused")

STATE_WIDTH = 32
"""int32 words of one slot's state."""

MAX_END_IDS = 16
"""End ids a slot can hold; runtime.request refuses more."""

HAS_BIAS, WANTS_LOGPROBS = 1, 2
"""Bits of SlotState.flags."""


@dataclass(frozen=True)
class Linear:
    """A projection as stored: weight `[out, in]`, dense or of 8 or 4 bits, and bias `[out]` or None."""

    weight: "Tensor | Fp8 | LowBit"
    bias: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of one decode step: `slots [B]` int32, -1 for an idle row (reads and writes no cache); `positions [B]` int32,
    the index of the token being written (keys seen = position + 1)."""

    slots: Tensor
    positions: Tensor


@dataclass(frozen=True)
class SlotState:
    """Device state by slot. One packed int32 tensor `[slots, 32]`, so that a request arrives in one copy; the rest are views,
    but for two tables of 4 bytes an id, which are written only for requests that ask for penalties or a bias.

    Attributes:
        token: last token known, `[slots]`; position: the index it will be written at.
        limit: the index at which a drawn token is the last; min_position: the first index at which an end id may stand.
        done: not zero once an end id or the limit was drawn; the slot's rows are idle from then on.
        end_ids: `[slots, 16]`, -1 where unused.
        seed `[slots, 2]`, choice, top_k int32; temperature, top_p, min_p float32.
        repetition, presence, frequency: the penalties, float32; flags: HAS_BIAS and WANTS_LOGPROBS.
        seen: `[slots, V]` int32, twice the times an id was drawn, and one more if the prompt holds it; bias: `[slots, V]`
            float32. A slot whose request has no penalties, or no bias, may hold an earlier owner's: it is not read.
    """

    packed: Tensor
    token: Tensor
    position: Tensor
    limit: Tensor
    min_position: Tensor
    done: Tensor
    seed: Tensor
    choice: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    end_ids: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    flags: Tensor
    seen: Tensor
    bias: Tensor

    @classmethod
    def allocate(cls, slots: int, device: torch.device, vocab: int = 0) -> "SlotState":
        """State of `slots` slots; `vocab` 0 where no draw is `full`. 8 * V bytes a slot (1 MB of 128k ids) beside 128."""
        packed = torch.zeros((slots, STATE_WIDTH), dtype=torch.int32, device=device)
        words, floats = packed.unbind(1), packed.view(torch.float32).unbind(1)
        return cls(
            packed,
            token=words[0],
            position=words[1],
            limit=words[2],
            min_position=words[3],
            done=words[4],
            seed=packed[:, 5:7],
            choice=words[7],
            top_k=words[8],
            temperature=floats[9],
            top_p=floats[10],
            min_p=floats[11],
            end_ids=packed[:, 12 : 12 + MAX_END_IDS],
            repetition=floats[28],
            presence=floats[29],
            frequency=floats[30],
            flags=words[31],
            seen=torch.zeros((slots, vocab), dtype=torch.int32, device=device),
            bias=torch.zeros((slots, vocab), dtype=torch.float32, device=device),
        )


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
    """One way to play a decode step. x is `[B, C]` in the run's dtype; sums are float32, rounded once.

    Attributes:
        pdl: whether its kernels are chained by programmatic dependent launch.
        kernels_per_layer: different kernels that play a layer; None where cuBLAS chooses them by shape.
        launches_per_layer: kernel launches of a layer on CUDA; launches_per_qk_norm: how many more with per-head q and k norms;
            launches_per_lowbit: with weights of 8 or 4 bits.
        launches_around: those of `embed` and `norm_lm_head`.
    """

    name: str
    pdl: bool
    kernels_per_layer: int | None
    launches_per_layer: int
    launches_per_qk_norm: int
    launches_per_lowbit: int
    launches_around: int

    def embed(
        self, slot_of_row: Tensor, state: SlotState, table: Tensor, next_norm: Tensor, next_proj: Linear
    ) -> tuple[Tensor, Rows]:
        """The step's first call: slot_of_row `[B]` int32 (-1: no slot), table `[V, C]` -> x `[B, C]`, the embedding of each
        slot's last token, and the step's rows; a row whose slot is done is idle. next_norm `[C]` is the weight of the norm
        that x goes through next, next_proj the projection after it: an ops set may begin the norm here."""

    def norm_qkv_rope(
        self, x: Tensor, norm: Tensor, qkv: Linear, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """x `[B, C]` -> q `[B, H, D]`; k and v go to (slot, position) of the caches `[slots, K, S, D]`. What has been done to
        q by then is private to the ops set."""

    def attention(self, q: Tensor, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q `[B, H, D]` -> `[B, H*D]`. Idle rows give zeros. After it the caches hold normed, rotated K, and V."""

    def proj_residual(self, a: Tensor, proj: Linear, x: Tensor, next_norm: Tensor) -> Tensor:
        """a `[B, in]`, x `[B, C]` -> x + proj(a) `[B, C]`; next_norm as in `embed`."""

    def norm_gate_up(self, x: Tensor, norm: Tensor, gate_up: Linear, eps: float) -> Tensor:
        """x `[B, C]` -> silu(gate(norm x)) * up(norm x) `[B, F]`; gate's rows come first in `gate_up`."""

    def norm_lm_head(self, x: Tensor, norm: Tensor, lm_head: Linear, eps: float) -> Tensor:
        """x `[B, C]` -> logits `[B, V]` float32, never rounded."""


def load_ops(name: str, pdl: bool = False) -> Ops:
    """The ops set called `name`; `pdl` chains the fused set's kernels by programmatic dependent launch (Hopper and newer).

    Raises:
        ConfigError: no such set.
    """
    if name == "unfused":
        from runtime.ops.unfused import UnfusedOps

        return UnfusedOps()
    if name == "fused":
        from runtime.ops.fused import FusedOps
        from runtime.ops.tuned import load_tuned

        return FusedOps(pdl, tiles=load_tuned(torch.cuda.get_device_name()) if torch.cuda.is_available() else {})
    raise ConfigError(f"ops is {name!r}; allowed: {', '.join(OPS_SETS)}")
