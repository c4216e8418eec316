"""Owns the fused path: four Triton kernels play a layer in five launches, one each the embedding and the LM head.

Does not own the kernels, each of which has a file, nor their tiles (configs). The unfused path is its oracle.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.ops import Attention, Linear, Rows, SlotState
from runtime.ops._gemv import TOKENS, Scaled, slice_of
from runtime.ops.attention import AttentionScratch, AttentionTile, attention_tile, decode_attention
from runtime.ops.configs import Kernel, Tile, int4_single_tile, multiplies, splits_fit, tile_for
from runtime.ops.embed import embed, embed_blocks
from runtime.ops.fp8 import Fp8
from runtime.ops.lowbit import BLOCK_ROWS, LowBit
from runtime.ops.lowbit_batch import lowbit_batch, lowbit_tile
from runtime.ops.norm_gate_up import norm_gate_up
from runtime.ops.norm_linear import norm_linear
from runtime.ops.proj_residual import proj_residual
from runtime.ops.token_linear import token_linear
from runtime.ops.tuned import TileKey, Tiles


class FusedOps:
    """The seam's calls, one launch each: a layer takes five (norm_qkv_rope, attention, proj_residual, norm_gate_up,
    proj_residual).

    Every call writes into a workspace made at the first step of a batch size and returns it: a result lives until the same
    call's turn in the next layer. Between norm_qkv_rope and attention pass the raw float32 sums of q, k and v; the launch that
    makes x also leaves what the next norm needs (`Scaled`; not of one row in float32 with dense weights), which only that norm,
    of that x, takes up. One row's products with dense and FP8 weights are one kernel (token_linear), cut for each place and
    named by it.

    Attributes:
        pdl: programmatic dependent launch. The embedding and the launch after it go without the attribute, so that rows.slots
            and rows.positions may be read before a wait; a caller that fills them otherwise must do so before `embed`.
        interpreted: for Triton's interpreter: products in float32 and no PDL instructions.
        tiles: those that take the place of the built-in ones (configs, attention_tile).
    """

    name = "fused"
    kernels_per_layer: int | None = 4
    launches_per_layer = 5
    launches_per_qk_norm = 0
    launches_per_lowbit = 0
    launches_around = 2

    def __init__(
        self,
        pdl: bool = True,
        interpreted: bool = False,
        tiles: Tiles | None = None,
    ) -> None:
        self.pdl = pdl and not interpreted
        self.interpreted = interpreted
        self.tiles = tiles or {}
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._scratch: dict[tuple[object, ...], AttentionScratch] = {}
        self._scaled: dict[tuple[object, ...], Scaled] = {}
        self._in_norm: tuple[Tensor, Tensor, Scaled]

    def embed(
        self, slot_of_row: Tensor, state: SlotState, table: Tensor, next_norm: Tensor, next_proj: Linear
    ) -> tuple[Tensor, Rows]:
        batch, width = len(slot_of_row), table.shape[1]
        x = self._buffer("embedded", (batch, width), table)
        rows = Rows(*(self._buffer(name, (batch,), slot_of_row) for name in ("slots", "positions")))
        raised = not isinstance(next_proj.weight, Tensor)
        scaled = self._begin_norm(x, next_norm, "embed", embed_blocks(width), raised) if self._begins(x, next_proj) else None
        embed(slot_of_row, state, table, x, rows, next_norm, scaled)
        return x, rows

    def norm_qkv_rope(
        self, x: Tensor, norm: Tensor, qkv: Linear, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Norm and projection -> `[P, B, (H+2K)*D]` float32, P parts of the sums; adding them, rotation and cache write are the
        attention launch's prologue."""
        after_embed = x is self._buffers.get(("embedded", x.shape, x.dtype))
        return self._norm_linear(x, norm, qkv, attention.eps, "qkv", full_edge=after_embed)

    def attention(self, q: Tensor, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        spec, batch = attention, q.shape[1]
        out = self._buffer("attention", (batch, spec.heads * spec.head_dim), k_cache)
        size = k_cache.element_size()
        chosen = self.tiles.get(TileKey.of("attention", batch, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, size))
        assert chosen is None or isinstance(chosen, AttentionTile)
        tile = chosen or attention_tile(spec, batch, size)
        key = (batch, spec.heads, spec.kv_heads, spec.head_dim, tile)
        if key not in self._scratch:
            self._scratch[key] = AttentionScratch.make(batch, spec, q.device, tile)
        scratch = self._scratch[key]
        return decode_attention(q, spec, rows, k_cache, v_cache, out, scratch, tile, True, self.pdl, self.interpreted)

    def proj_residual(self, a: Tensor, proj: Linear, x: Tensor, next_norm: Tensor) -> Tensor:
        first, second = (self._buffer(name, tuple(x.shape), x) for name in ("x", "other x"))
        out = second if x is first else first
        if self._in_tiles(a, proj):
            return self._lowbit(a, proj, out, next_norm=next_norm, residual=x)
        tile = self._tile("proj_residual", a, proj)
        blocks = -(-proj.weight.shape[0] // tile.rows)
        raised = not isinstance(proj.weight, Tensor)
        scaled = self._begin_norm(out, next_norm, "proj_residual", blocks, raised) if self._begins(x, proj) else None
        if self._multiplies(a, proj):
            how = (self.pdl, self.interpreted)
            return token_linear(a, proj, out, tile, *how, residual=x, next_norm=next_norm, next_scaled=scaled)
        cells = blocks * tile.splits * tile.rows * TOKENS if len(a) > 1 and tile.splits > 1 else 1
        partial = self._buffer("partial", (cells,), x, torch.float32)
        counter = self._buffer("counter", (blocks,), x, torch.int32)
        return proj_residual(a, proj, x, next_norm, scaled, out, partial, counter, tile, self.pdl, self.interpreted)

    def norm_gate_up(self, x: Tensor, norm: Tensor, gate_up: Linear, eps: float) -> Tensor:
        n = gate_up.weight.shape[0] // 2
        out = self._buffer("gated", (len(x), n), x)
        if self._in_tiles(x, gate_up):
            return self._lowbit(x, gate_up, out, norm=norm, eps=eps, gated=True)
        tile = self._tile("norm_gate_up", x, gate_up)
        begun = self._begun(x, norm) if self._begins(x, gate_up) else None
        if self._multiplies(x, gate_up):
            return token_linear(x, gate_up, out, tile, self.pdl, self.interpreted, scaled=begun, eps=eps, gated=True)
        return norm_gate_up(x, norm, begun, gate_up, eps, out, tile, self.pdl, self.interpreted)

    def norm_lm_head(self, x: Tensor, norm: Tensor, lm_head: Linear, eps: float) -> Tensor:
        return self._norm_linear(x, norm, lm_head, eps, "logits").squeeze(0)

    def _norm_linear(self, x: Tensor, norm: Tensor, linear: Linear, eps: float, name: str, full_edge: bool = False) -> Tensor:
        """`[P, B, N]` float32, of which only q, k and v have more parts than one."""
        shape = (len(x), linear.weight.shape[0])
        if self._in_tiles(x, linear):
            assert isinstance(linear.weight, LowBit)
            parts = lowbit_tile(linear.weight).splits if name == "qkv" else 1
            out = self._buffer(name, (parts, *shape), x, torch.float32)
            return self._lowbit(x, linear, out, norm=norm, eps=eps, full_edge=full_edge)
        tile = self._tile("norm_linear", x, linear)
        if name != "qkv":
            tile = replace(tile, splits=1)
        out = self._buffer(name, (tile.splits, *shape), x, torch.float32)
        begun = self._begun(x, norm) if self._begins(x, linear) else None
        if self._multiplies(x, linear):
            return token_linear(x, linear, out, tile, self.pdl, self.interpreted, scaled=begun, eps=eps, full_edge=full_edge)
        return norm_linear(x, norm, begun, linear, eps, out, tile, self.pdl, self.interpreted, full_edge)

    def _lowbit(
        self,
        x: Tensor,
        linear: Linear,
        out: Tensor,
        norm: Tensor | None = None,
        next_norm: Tensor | None = None,
        **how: Any,
    ) -> Tensor:
        """A batch's projection with INT4 weights; `how`: further arguments of `lowbit_batch`."""
        weight = linear.weight
        assert isinstance(weight, LowBit)
        tile = lowbit_tile(weight, how.get("gated", False))
        programs = -(-len(weight.tiles) // tile.blocks)
        if norm is not None:
            how["scaled"] = self._begun(x, norm)
        if next_norm is not None:
            how |= {"next_norm": next_norm, "next_scaled": self._begin_norm(out, next_norm, "proj_residual", programs)}
        if out.shape[:-2].numel() < tile.splits:
            cells = programs * tile.splits * tile.blocks * BLOCK_ROWS * TOKENS
            how["partial"] = self._buffer("partial", (cells,), x, torch.float32)
            how["counter"] = self._buffer("counter", (programs,), x, torch.int32)
        return lowbit_batch(x, linear, out, tile, self.pdl, self.interpreted, **how)

    @staticmethod
    def _begins(x: Tensor, linear: Linear) -> bool:
        """Whether the launch that makes x begins the norm before `linear`: a batch's, and one row's but of dense float32."""
        return len(x) > 1 or not isinstance(linear.weight, Tensor) or x.element_size() == 2

    @staticmethod
    def _in_tiles(x: Tensor, linear: Linear) -> bool:
        """Whether lowbit_batch has the product."""
        return len(x) > 1 and isinstance(linear.weight, LowBit)

    @staticmethod
    def _multiplies(x: Tensor, linear: Linear) -> bool:
        """Whether token_linear has the product."""
        return len(x) == 1 and (not isinstance(linear.weight, Tensor) or multiplies(x.element_size(), x.shape[1]))

    def _begin_norm(self, x: Tensor, norm: Tensor, by: str, blocks: int, lowbit: bool = False) -> Scaled:
        """Where the launch that makes x, in `blocks` blocks, begins the norm that comes next; `lowbit`: for INT4 or FP8."""
        key = (by, blocks, x.shape[1], x.dtype, len(x) > 1, lowbit)
        if key not in self._scaled:
            tokens, raised = (1, lowbit) if len(x) == 1 else (TOKENS, False)
            self._scaled[key] = Scaled.make(x.shape[1], x.dtype, x.device, blocks, tokens, raised)
        self._in_norm = (x, norm, self._scaled[key])
        return self._scaled[key]

    def _begun(self, x: Tensor, norm: Tensor) -> Scaled:
        """What the launch that made x left of this norm."""
        made, begun, scaled = self._in_norm
        assert made is x
        assert begun is norm
        return scaled

    def reset(self) -> None:
        """Zero the counters after a failed step, which may have left some half way."""
        for (name, *_), tensor in self._buffers.items():
            if name == "counter":
                tensor.zero_()
        for scratch in self._scratch.values():
            scratch.counter.zero_()

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor made once for each name, shape and dtype, zeroed then (counters rely on it)."""
        key = (name, torch.Size(shape), dtype or like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, dtype=key[2], device=like.device)
        return self._buffers[key]

    def _tile(self, kernel: Kernel, x: Tensor, linear: Linear) -> Tile:
        n, weight = linear.weight.shape[0] // (2 if kernel == "norm_gate_up" else 1), linear.weight
        if isinstance(weight, LowBit):
            return int4_single_tile(kernel, n, x.shape[1], weight.group, weight.zeros is not None)
        itemsize = 1 if isinstance(weight, Fp8) and (len(x) == 1 or x.element_size() == 2) else x.element_size()
        chosen = self.tiles.get(TileKey.of(kernel, len(x), n, x.shape[1], itemsize))
        assert chosen is None or isinstance(chosen, Tile)
        if chosen is not None and len(x) > 1 and not splits_fit(x.shape[1] // slice_of(weight, chosen), chosen.splits):
            chosen = None  # one for weights with a scale for each row
        blocks = isinstance(weight, Fp8) and weight.group > 0
        return chosen or tile_for(kernel, n, x.shape[1], len(x), itemsize, blocks)
