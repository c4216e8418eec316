"""Owns the ladder from the unfused eager step to the fused one with PDL, each rung changing one thing, and the rung that only a
bench has: our GEMV kernels with prologue and epilogue off. Does not own the clock (timing).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.contenders import EngineRun
from runtime.engine import Engine
from runtime.ops import Attention, Linear, Ops, Rows, load_ops
from runtime.ops.fused import FusedOps
from runtime.ops.silu_mul import silu_mul
from runtime.ops.unfused import UnfusedOps, rms_norm

BARE, NO_PDL = "bare", "fused, no PDL"
RUNGS = (
    ("unfused", "off", "unfused, launched one by one"),
    ("unfused", "on", "the same as one graph"),
    (BARE, "on", "our GEMV kernels for cuBLAS's, nothing fused"),
    (NO_PDL, "on", "fused: norms, rotation, cache write, residuals and SiLU inside"),
    ("fused", "on", "chained by PDL"),
)
"""(ops, graph, what changes)."""


class BareOps(UnfusedOps):
    """The unfused launches with our GEMV kernel in cuBLAS's place: proj_residual on a residual of zeros. (With several rows it
    also leaves what a next norm would begin with, a few KB.) Each projection has a workspace of its own: a fused call's result
    lives until its next turn."""

    name = BARE

    def __init__(self) -> None:
        super().__init__()
        self._gemvs: dict[str, FusedOps] = {}
        self._zeros: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def norm_qkv_rope(
        self, x: Tensor, norm: Tensor, qkv: Linear, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        from runtime.ops.cache_write import cache_write
        from runtime.ops.rope import rope

        spec, h = attention, rms_norm(x, norm, attention.eps)
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        q, k, v = (
            self._gemv(name, h, part).view(len(x), -1, spec.head_dim)
            for name, part in zip(("q", "k", "v"), _rows(qkv, sizes), strict=True)
        )
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = rms_norm(q, spec.q_norm, spec.eps), rms_norm(k, spec.k_norm, spec.eps)
        rope(q, k, spec, rows.positions)
        cache_write(k, v, rows, k_cache, v_cache)
        return q

    def proj_residual(self, a: Tensor, proj: Linear, x: Tensor, next_norm: Tensor) -> Tensor:
        return x + self._gemv(f"proj {a.shape[1]}", a, proj)

    def norm_gate_up(self, x: Tensor, norm: Tensor, gate_up: Linear, eps: float) -> Tensor:
        h, half = rms_norm(x, norm, eps), gate_up.weight.shape[0] // 2
        gate, up = (self._gemv(name, h, part) for name, part in zip(("gate", "up"), _rows(gate_up, [half, half]), strict=True))
        return silu_mul(gate, up)

    def norm_lm_head(self, x: Tensor, norm: Tensor, lm_head: Linear, eps: float) -> Tensor:
        return self._gemv("lm_head", rms_norm(x, norm, eps), lm_head, torch.float32)

    def _gemv(self, name: str, h: Tensor, linear: Linear, dtype: torch.dtype | None = None) -> Tensor:
        """h `[B, in]` -> `[B, out]` in the residual's dtype, h's unless another is given."""
        key = (len(h), linear.weight.shape[0], dtype or h.dtype)
        if key not in self._zeros:
            zeros = torch.zeros(key[:2], dtype=key[2], device=h.device)
            self._zeros[key] = (zeros, torch.zeros(key[1], dtype=h.dtype, device=h.device))
        gemv = self._gemvs.setdefault(name, FusedOps(pdl=False))
        return gemv.proj_residual(h.contiguous(), linear, *self._zeros[key])


def _rows(linear: Linear, sizes: Sequence[int]) -> list[Linear]:
    """A merged projection's parts, as views."""
    assert isinstance(linear.weight, Tensor)  # dense weights only: others are merged tile by tile
    biases = linear.bias.split(sizes) if linear.bias is not None else [None] * len(sizes)
    return [Linear(weight, bias) for weight, bias in zip(linear.weight.split(sizes), biases, strict=True)]


def _add_mode(engine: Engine, name: str, ops: Ops) -> None:
    steps = engine.modes.steps
    steps.setdefault(name, replace(engine.modes.step_of("unfused"), ops=ops))


def without_pdl(engine: Engine, graph: str = "on") -> EngineRun:
    """The engine's fused ops with PDL off, as a mode of its own."""
    _add_mode(engine, NO_PDL, load_ops("fused", pdl=False))
    return EngineRun(engine, NO_PDL, graph)


def bare(engine: Engine) -> EngineRun:
    """The bench's own rung as a mode of the engine."""
    _add_mode(engine, BARE, BareOps())
    return EngineRun(engine, BARE, "on")
