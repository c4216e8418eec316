"""Owns those who turn prompts into tokens under the clock: Quartet's engine, on every rung of the ladder from unfused eager to
fused with PDL, one of which only a bench has (our GEMV kernels with prologue and epilogue off), and Hugging Face transformers.

All play random ids, other ones in every pass, greedily and with no end ids. Does not own the clock (timing).
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.timing import Shape
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.ops import Attention, Linear, Ops, Rows, load_ops
from runtime.ops.fused import FusedOps
from runtime.ops.silu_mul import silu_mul
from runtime.ops.unfused import UnfusedOps, rms_norm
from runtime.request import Request

BARE, NO_PDL = "bare", "fused, no PDL"
RUNGS = (
    ("unfused", "off", "unfused, launched one by one"),
    ("unfused", "on", "the same as one graph"),
    (BARE, "on", "our GEMV kernels for cuBLAS's, nothing fused"),
    (NO_PDL, "on", "fused: norms, rotation, cache write, residuals and SiLU inside"),
    ("fused", "on", "chained by PDL"),
)
"""(ops, graph, what changes)."""


def needed_len(shape: Shape, chunk: int) -> int:
    """Positions a slot must hold for a pass of this shape: the first stream decodes while the others' prompts are computed."""
    return shape.depth + shape.prompt_len + shape.gen_len + (shape.batch - 1) * _prompt_steps(shape, chunk)


def _prompt_steps(shape: Shape, chunk: int) -> int:
    """Steps, one to spare, in which a prompt is computed: streams before it produce a token in each of them."""
    return -(-shape.prompt_len // chunk) + 1


class EngineRun:
    """An engine in one of its modes. See `timing.Contender`."""

    def __init__(self, engine: Engine, ops: str, graph: str) -> None:
        self.engine = engine
        self.ops = ops
        self.graph = graph
        self._requests: list[Request] = []

    def prepare(self, shape: Shape, seed: int) -> None:
        engine = self.engine
        engine.modes.switch(self.ops, self.graph == "on")
        for cached in (engine.cache.k, engine.cache.v):
            cached[..., : shape.depth, :].normal_()
        ids = random_ids(engine.model.vocab_size, shape.batch, shape.depth + shape.prompt_len, seed)
        # Earlier streams may run longer, so that the batch stays whole until the last one is done.
        spare = _prompt_steps(shape, engine.config.prefill_chunk)
        lengths = [shape.gen_len + (shape.batch - 1 - i) * spare for i in range(shape.batch)]
        self._requests = [Request(str(i), tuple(ids[i]), max_tokens=lengths[i], cached=shape.depth) for i in range(shape.batch)]
        _synchronize(engine.model.device)

    def submit(self) -> None:
        for request in self._requests:
            self.engine.submit(request)

    def advance(self) -> list[int]:
        if not self.engine.has_work:
            raise RequestError("the engine ran out of work before every stream had its tokens")
        streams = []
        for event in self.engine.step():
            if event.finish == "error":
                raise RequestError(f"request {event.request_id}: {event.message}")
            if event.token is not None:
                streams.append(int(event.request_id))
        return streams

    def finish(self) -> None:
        for request in self._requests:
            self.engine.cancel(request.id)
        while self.engine.has_work:
            self.engine.step()


class TransformersRun:
    """A transformers model in eval mode: its eager forward with a dynamic cache, or its forward compiled for CUDA graphs (mode
    "reduce-overhead") with a static cache, prompts eager. See `timing.Contender`."""

    def __init__(self, hf: Any, compiled: bool = False) -> None:
        self.ops, self.graph = ("transformers compiled", "on") if compiled else ("transformers", "off")
        self._hf = hf
        self._forward = (
            torch.compile(hf.forward, mode="reduce-overhead", fullgraph=True, dynamic=False) if compiled else hf.forward
        )
        # Versions differ, and forward takes any keyword: a wrong name would quietly mean no cache.
        self._cache_name = "cache" if "cache" in inspect.signature(type(hf).forward).parameters else "past_key_values"
        self._compiled = compiled
        self._static: dict[Shape, Any] = {}  # the compiled graphs know a cache by its address
        self._cache: Any = None
        self._prompt = True
        self._ids = torch.empty(0)

    @torch.no_grad()
    def prepare(self, shape: Shape, seed: int) -> None:
        config, device = self._hf.config, self._hf.device
        self._ids = torch.tensor(random_ids(config.vocab_size, shape.batch, shape.prompt_len, seed))
        self._cache, self._prompt = self._empty(shape), True
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = (shape.batch, config.num_key_value_heads, shape.depth, head_dim)
        for layer in range(config.num_hidden_layers if shape.depth else 0):
            k, v = (torch.randn(size, dtype=self._hf.dtype, device=device) for _ in range(2))
            self._cache.update(k, v, layer)
        _synchronize(device)

    def submit(self) -> None:
        self._ids = self._ids.to(self._hf.device)

    @torch.no_grad()
    def advance(self) -> list[int]:
        forward = self._hf.forward if self._prompt else self._forward
        torch.compiler.cudagraph_mark_step_begin()
        arguments = {"input_ids": self._ids, self._cache_name: self._cache, "use_cache": True, "logits_to_keep": 1}
        try:
            tokens = forward(**arguments).logits[:, -1].argmax(dim=-1)  # [B]
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # a compiler's, of this rival alone: the other cells go on
            raise RequestError(f"transformers failed: {str(error).splitlines()[0]}") from error
        tokens.tolist()  # the wait for the device, as for a user who reads them
        self._ids, self._prompt = tokens[:, None].clone(), False
        return list(range(len(tokens)))

    def finish(self) -> None:
        self._cache = None

    def _empty(self, shape: Shape) -> Any:
        from transformers import DynamicCache, StaticCache

        if not self._compiled:
            return DynamicCache(config=self._hf.config)
        if shape not in self._static:
            length = shape.depth + shape.prompt_len + shape.gen_len
            self._static[shape] = StaticCache(config=self._hf.config, max_cache_len=length)
        self._static[shape].reset()
        return self._static[shape]


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


def without_pdl(engine: Engine, graph: str = "on") -> EngineRun:
    """The engine's fused ops with PDL off, as a mode of its own."""
    return _own_mode(engine, NO_PDL, load_ops("fused", pdl=False), graph)


def bare(engine: Engine) -> EngineRun:
    """The bench's own rung as a mode of the engine."""
    return _own_mode(engine, BARE, BareOps(), "on")


def _own_mode(engine: Engine, name: str, ops: Ops, graph: str) -> EngineRun:
    engine.modes.steps.setdefault(name, replace(engine.modes.step_of("unfused"), ops=ops))
    return EngineRun(engine, name, graph)


def random_ids(vocab_size: int, batch: int, length: int, seed: int) -> list[list[int]]:
    """Token ids `[batch, length]` drawn evenly from the vocabulary."""
    found: list[list[int]] = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def _synchronize(device: torch.device) -> None:
    """Wait for what is enqueued: nothing of the preparation may fall into the timed pass."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
