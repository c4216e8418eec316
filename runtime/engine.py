"""Owns the loop: admit, prefill, decode, sample, commit, emit. Speaks token ids, never text; one thread calls it.

Does not own the model (handed in), the slots' bookkeeping (scheduler), device state and the step (decode_step) or the draw
(sampling).
"""

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from runtime.config import EngineConfig
from runtime.decode_graph import DecodeGraphs
from runtime.decode_step import DecodeStep, Model, pack
from runtime.device import used_bytes
from runtime.errors import ConfigError, ContextLengthError, DeviceError, RequestError
from runtime.kv_cache import KVCache
from runtime.ops import OPS_SETS, STATE_WIDTH, Rows, SlotState, load_ops
from runtime.pinned import Landing, PinnedRing
from runtime.request import Request, TokenEvent
from runtime.sampling import VARIANTS, Sampler, variant
from runtime.scheduler import Running, Scheduler

log = logging.getLogger(__name__)

NOT_FINITE_MESSAGE = "the model's logits are not finite; a float16 run of a bfloat16 checkpoint overflows: use --dtype bfloat16"


@dataclass(frozen=True)
class _Flight:
    """Tokens that have been enqueued and not yet read: one for each of `rows`."""

    rows: list[Running]
    landing: Landing


@dataclass(frozen=True)
class Prepared:
    """Seconds that `Engine.prepare` took."""

    compile_seconds: float
    capture_seconds: float

    def __str__(self) -> str:
        return f"kernels compiled or loaded in {self.compile_seconds:.1f} s, graphs captured in {self.capture_seconds:.1f} s"


@dataclass(frozen=True)
class Mode:
    """A way to play decode steps, whether this engine can, and why not."""

    ops: str
    graph: str
    available: bool
    reason: str | None


@dataclass(frozen=True)
class Playing:
    """How steps are played now and what that takes.

    Attributes:
        graph: "on" or "off"; pdl: "on" or "off", whether the ops set chains its kernels by programmatic dependent launch.
        kernels_per_layer: different kernels that play a layer; None where cuBLAS chooses them by shape.
        launches_per_layer, launches_per_step: kernel launches on CUDA; a step's with the plain draw.
        host_launches_per_step: what the host launches for them: one graph, or each kernel.
        memory_used_bytes: see `runtime.device.used_bytes`.
    """

    ops: str
    graph: str
    pdl: str
    kernels_per_layer: int | None
    launches_per_layer: int
    launches_per_step: int
    host_launches_per_step: int
    memory_used_bytes: int
    modes: tuple[Mode, ...]


class Engine:
    """Continuous batching over the slots of one model. Each `step` plays at most one prompt chunk and one decode step.

    Args:
        model: the decoder; the engine's cache and state live on its device.
        config: settled by `runtime.device.resolve`: no "auto" left, max_len set.

    Raises:
        OutOfMemoryError: the KV cache does not fit.
        ConfigError: no such ops set.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        assert config.max_len is not None
        self.config = config
        self.model = model
        self.max_len = config.max_len
        self.cache = KVCache.allocate(
            model.num_layers, config.max_slots, model.num_kv_heads, self.max_len, model.head_dim, model.dtype, model.device
        )
        self.state = SlotState.allocate(config.max_slots, model.device)
        self.ops_name: str = config.ops
        self.graph = config.graph != "off"
        self._sampler = Sampler()
        self._steps: dict[str, DecodeStep] = {}
        self._graphs: dict[str, DecodeGraphs] = {}
        self._warmed: set[str] = set()
        self._scheduler = Scheduler(config.max_slots, self.max_len)
        self._slot_of_row = torch.full((config.max_slots,), -1, dtype=torch.int32, device=model.device)
        self._rows: list[Running] = []  # what _slot_of_row says now
        self._uploads = PinnedRing(STATE_WIDTH, model.device)
        self._readback = PinnedRing(config.max_slots, model.device)
        self._flights: deque[_Flight] = deque()
        # On CUDA step n+1 is enqueued before step n's tokens are read; the CPU computes in the call, so nothing can run ahead.
        self._run_ahead = 1 if model.device.type == "cuda" else 0
        self._cancelled: list[TokenEvent] = []

    @property
    def mode(self) -> tuple[str, bool]:
        """How decode steps are played now: the ops set's name, and whether graphs are replayed."""
        return self.ops_name, self.graph

    def playing(self) -> Playing:
        """The mode, and what it takes on this machine now. For the thread that calls `step`."""
        step, words = self.step_of(self.ops_name), {True: "on", False: "off"}
        refusals = [(ops, words[graph], self.refusal(ops, graph)) for ops in OPS_SETS for graph in (True, False)]
        return Playing(
            ops=self.ops_name,
            graph=words[self.graph],
            pdl=words[step.ops.pdl],
            kernels_per_layer=step.ops.kernels_per_layer,
            launches_per_layer=step.launches_per_layer,
            launches_per_step=step.launches,
            host_launches_per_step=1 if self.graph else step.launches,
            memory_used_bytes=used_bytes(self.model.device),
            modes=tuple(Mode(ops, graph, refusal is None, refusal) for ops, graph, refusal in refusals),
        )

    def refusal(self, ops: str, graph: bool) -> str | None:
        """Why this engine cannot play a mode; None if it can."""
        if self.model.device.type == "cuda" or (ops, graph) == ("unfused", False):
            return None
        return "fused kernels and graphs need a CUDA device; this engine runs on the CPU, with ops unfused and graph off"

    def prepare(self, every_mode: bool = False) -> Prepared:
        """Compile every kernel of every ops set this device can run, and capture the mode's graphs; call once, before serving.

        Args:
            every_mode: capture the graphs of every ops set; else those of other modes are captured when first switched to.

        Raises:
            ConfigError: a capture failed and graphs were asked for; with graph "auto" the engine goes on eagerly and logs why.
        """
        start = time.perf_counter()
        if self.model.device.type != "cuda":  # torch has nothing to compile
            return Prepared(0.0, 0.0)
        self._warm_prefill()
        for name in OPS_SETS:
            self._warm(name)
        compiled = time.perf_counter()
        try:
            for name in OPS_SETS if every_mode else [self.ops_name] if self.graph else []:
                self._capture(name)
        except ConfigError as error:
            if self.config.graph == "on":
                raise ConfigError(f"graph on was asked for and {error}; use --graph off") from error
            log.warning("graph off, decoding eagerly: %s", error)
            self.graph = False
            self._graphs.clear()
        return Prepared(compiled - start, time.perf_counter() - compiled)

    def switch(self, ops: str | None = None, graph: bool | None = None) -> float:
        """Change the mode between two steps; streams go on over the same cache. None keeps what is.

        Returns:
            Seconds the streams stood still, for graphs captured at a mode's first use.

        Raises:
            ConfigError: this device cannot play that mode, or its capture failed; the mode stays as it was.
        """
        ops, graph = ops or self.ops_name, self.graph if graph is None else graph
        refusal = self.refusal(ops, graph)
        if refusal is not None:
            raise ConfigError(refusal)
        start = time.perf_counter()
        if graph and ops not in self._graphs:
            self._warm(ops)
            self._capture(ops)
        self.ops_name, self.graph = ops, graph
        return time.perf_counter() - start

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self.num_running or self.num_waiting or self._flights or self._cancelled)

    def check(self, request: Request) -> None:
        """Refuse what can never run here; safe to call from any thread.

        Raises:
            RequestError: a token id outside the vocabulary.
            ContextLengthError: the prompt leaves no room for a token.
        """
        for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.end_ids)):
            for token in ids:
                if not 0 <= token < self.model.vocab_size:
                    raise RequestError(f"token id {token} is outside the vocabulary of 0 to {self.model.vocab_size - 1}", name)
        if len(request.prompt_ids) >= self.max_len:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_ids)} tokens and the context holds {self.max_len}, the answer included; "
                f"shorten the prompt to at most {self.max_len - 1} tokens",
                "prompt",
            )

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens come from later steps. The answer is cut at the end of the context. Raises as `check`."""
        self.check(request)
        self._scheduler.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is: its slot is free for the next step, which tells one last event. Unknown ids pass."""
        if self._scheduler.cancel(request_id):
            self._cancelled.append(TokenEvent(request_id, None, "cancelled"))

    def generate(self, requests: Iterable[Request]) -> dict[str, list[int]]:
        """Run requests to their end; the ids produced, by request id. For scripts and tests; servers call `step`.

        Raises:
            RequestError: as `submit`, or a request that ended with an error.
        """
        tokens: dict[str, list[int]] = {}
        for request in requests:
            self.submit(request)
            tokens[request.id] = []
        while self.has_work:
            for event in self.step():
                if event.finish == "error":
                    raise RequestError(f"request {event.request_id}: {event.message}")
                if event.token is not None:
                    tokens[event.request_id].append(event.token)
        return tokens

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Admit, compute one prompt chunk, decode one token a row, and tell what has landed.

        Raises:
            DeviceError: the device failed; the engine must be dropped.
        """
        events, self._cancelled = self._cancelled, []
        try:
            for running in self._scheduler.admit():
                self._uploads.upload(pack(running.request, running.limit), self.state.packed[running.slot])
            prefilling = self._scheduler.next_prefill()
            if prefilling is not None:
                self._prefill(prefilling)
                if prefilling.decoding:  # its first token is out: it is told before anything else is launched
                    return events + self._commit(0)
            decoding = self._scheduler.decoding()
            if decoding:
                self._decode(decoding)
            events += self._commit(self._run_ahead if decoding else 0)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise DeviceError(f"the device failed during a step: {str(error).splitlines()[0]}") from error
        return events

    def _prefill(self, running: Running) -> None:
        """Enqueue one chunk of a prompt, and the first token behind the last chunk."""
        prompt = running.request.prompt_ids
        start = running.prefilled
        chunk = prompt[start : start + self.config.prefill_chunk]
        host_ids = torch.tensor(chunk, dtype=torch.int64, pin_memory=self.model.device.type == "cuda")
        ids = host_ids.to(self.model.device, non_blocking=True)
        hidden = self.model.prefill(ids, start, running.slot, self.cache)
        running.prefilled += len(chunk)
        if running.decoding:
            slots = torch.full((1,), running.slot, dtype=torch.int32, device=self.model.device)
            rows = Rows(slots, torch.full_like(slots, len(prompt) - 1))
            logits = self.model.logits(hidden[-1:])
            tokens = self._sampler.draw(logits, rows, self.state, variant([running.request.params]))
            self._flights.append(_Flight([running], self._readback.download(tokens)))

    def _decode(self, rows: list[Running]) -> None:
        """Enqueue one decode step; slots cross to the device only when the batch has changed."""
        if rows != self._rows:
            self._uploads.upload([r.slot for r in rows], self._slot_of_row)
            self._rows = rows
        kind = variant([r.request.params for r in rows])
        if self.graph:
            tokens = self._graphs[self.ops_name].replay(len(rows), kind).tokens
        else:
            tokens, _ = self.step_of(self.ops_name)(self._slot_of_row[: len(rows)], kind)
        self._flights.append(_Flight(rows, self._readback.download(tokens)))

    def step_of(self, ops: str) -> DecodeStep:
        """The decode step of one ops set, over this engine's cache and state; its workspace is made once."""
        if ops not in self._steps:
            made = load_ops(ops, pdl=self.config.pdl == "on")
            self._steps[ops] = DecodeStep(self.model, made, self._sampler, self.cache, self.state)
        return self._steps[ops]

    @torch.inference_mode()
    def _warm_prefill(self) -> None:
        """Play one prompt chunk into slot 0, which no request has yet: cuBLAS and SDPA choose and load their kernels."""
        length = min(self.config.prefill_chunk, self.max_len - 1)
        ids = torch.zeros(length, dtype=torch.int64, device=self.model.device)
        self.model.logits(self.model.prefill(ids, 0, 0, self.cache)[-1:])

    @torch.inference_mode()
    def _warm(self, ops: str) -> None:
        """Play every batch size on idle rows, once: kernels are compiled, workspaces made; no cache and no state is touched."""
        if ops in self._warmed:
            return
        idle = torch.full_like(self._slot_of_row, -1)
        for batch in range(1, len(idle) + 1):
            for kind in VARIANTS:
                self.step_of(ops)(idle[:batch], kind)
        self._warmed.add(ops)

    @torch.inference_mode()
    def _capture(self, ops: str) -> None:
        """Raises ConfigError if the device or a kernel refuses."""
        graphs = DecodeGraphs(self.step_of(ops), self._slot_of_row)
        try:
            graphs.capture(range(1, self.config.max_slots + 1), VARIANTS)
        except RuntimeError as error:
            raise ConfigError(f"the capture of the {ops} graphs failed: {str(error).partition(chr(10))[0]}") from error
        self._graphs[ops] = graphs

    def _commit(self, leave: int) -> list[TokenEvent]:
        """Read flights until `leave` are in the air. Tokens behind a request's end are dropped."""
        events = []
        while len(self._flights) > leave:
            flight = self._flights.popleft()
            for running, token in zip(flight.rows, flight.landing.wait(), strict=True):
                if running.finish is not None:
                    continue
                finish = self._scheduler.commit(running, token)
                if finish == "error":
                    events.append(TokenEvent(running.request.id, None, finish, NOT_FINITE_MESSAGE))
                else:
                    events.append(TokenEvent(running.request.id, token, finish))
        return events
