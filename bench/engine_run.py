"""Owns Quartet's own engine as a contender of the latency bench. Does not own the clock (timing) or the cells (latency)."""

import torch
from torch import Tensor

from bench.timing import Shape
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.kv_cache import KVCache
from runtime.ops import Ops, Rows, SlotState
from runtime.request import Request


class FilledModel:
    """A model whose first `depth` positions are in the cache already: its prefill computes only what lies behind them."""

    def __init__(self, engine: Engine, depth: int) -> None:
        self._model = engine.model
        self._depth = depth
        self.vocab_size = self._model.vocab_size
        self.num_layers = self._model.num_layers
        self.num_kv_heads = self._model.num_kv_heads
        self.head_dim = self._model.head_dim
        self.qk_norm = self._model.qk_norm
        self.device = self._model.device
        self.dtype = self._model.dtype

    def prefill(self, ids: Tensor, start: int, slot: int, cache: KVCache) -> Tensor:
        """Hidden states of the ids at `depth` and behind; of none, when the whole chunk lies before it."""
        skipped = min(max(self._depth - start, 0), len(ids))
        if skipped == len(ids):
            return torch.empty((0, 0), dtype=self.dtype, device=self.device)
        return self._model.prefill(ids[skipped:], start + skipped, slot, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def decode(self, slot_of_row: Tensor, state: SlotState, cache: KVCache, ops: Ops) -> tuple[Rows, Tensor]:
        return self._model.decode(slot_of_row, state, cache, ops)


def prompt_steps(shape: Shape, chunk: int) -> int:
    """Steps, one to spare, in which a prompt is computed: streams before it produce a token in each of them."""
    return -(-(shape.depth + shape.prompt_len) // chunk) + 1


def needed_len(shape: Shape, chunk: int) -> int:
    """Positions a slot must hold for a pass of this shape: the first stream decodes while the others' prompts are computed."""
    return shape.depth + shape.prompt_len + shape.gen_len + (shape.batch - 1) * prompt_steps(shape, chunk)


class EngineRun:
    """An engine in one of its modes. Greedy, no end ids, prompts of random ids, other ones in every pass."""

    def __init__(self, engine: Engine, ops: str, graph: str) -> None:
        self.engine = engine
        self.ops = ops
        self.graph = graph
        self._plain = engine.model
        self._requests: list[Request] = []
        self._stream: dict[str, int] = {}

    def prepare(self, shape: Shape, seed: int) -> None:
        self.engine.switch(self.ops, self.graph == "on")
        cache, plain, chunk = self.engine.cache, self._plain, self.engine.config.prefill_chunk
        if shape.depth:
            cache.k[..., : shape.depth, :].normal_()
            cache.v[..., : shape.depth, :].normal_()
            self.engine.model = FilledModel(self.engine, shape.depth)
        generator = torch.Generator().manual_seed(seed)
        length = shape.depth + shape.prompt_len
        prompts = torch.randint(plain.vocab_size, (shape.batch, length), generator=generator).tolist()
        self._requests = [
            # Earlier streams may run longer, so that the batch stays whole until the last one is done.
            Request(f"{seed}-{i}", tuple(ids), max_tokens=shape.gen_len + (shape.batch - 1 - i) * prompt_steps(shape, chunk))
            for i, ids in enumerate(prompts)
        ]
        self._stream = {request.id: i for i, request in enumerate(self._requests)}
        self._synchronize()

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
                streams.append(self._stream[event.request_id])
        return streams

    def finish(self) -> None:
        for request in self._requests:
            self.engine.cancel(request.id)
        while self.engine.has_work:
            self.engine.step()
        self.engine.model = self._plain
        self._synchronize()

    def _synchronize(self) -> None:
        if self._plain.device.type == "cuda":
            torch.cuda.synchronize(self._plain.device)
