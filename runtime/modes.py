"""Owns the modes: an ops set and graph on or off, what is compiled and captured for each, and the change from one to another.

Does not own when steps are played or a mode is changed (engine), or the step itself (decode_step, decode_graph).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config import EngineConfig
from runtime.decode_graph import DecodeGraphs
from runtime.decode_step import DecodeStep, Model
from runtime.device import used_bytes
from runtime.errors import ConfigError
from runtime.kv_cache import KVCache
from runtime.ops import OPS_SETS, SlotState, load_ops
from runtime.sampling import VARIANTS, Sampler, Variant

log = logging.getLogger(__name__)


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


class Modes:
    """Every way to play the decode steps of one cache and state.

    Attributes:
        ops: the ops set that plays now; graph: whether its graphs are replayed.
        sets: what `prepare` compiles; kinds: the draws that are compiled and captured. All, unless a caller that plays fewer
            says so before.

    Args:
        slot_of_row: `[max_slots]` int32 on the device; a step of B rows reads its first B.
    """

    def __init__(
        self, model: Model, sampler: Sampler, cache: KVCache, state: SlotState, slot_of_row: Tensor, config: EngineConfig
    ) -> None:
        self._parts = (model, sampler, cache, state)
        self._slot_of_row = slot_of_row
        self._config = config
        self.ops: str = config.ops
        self.graph = False  # until prepared
        self.steps: dict[str, DecodeStep] = {}
        self.graphs: dict[str, DecodeGraphs] = {}
        self.sets: Sequence[str] = OPS_SETS
        self.kinds: Sequence[Variant] = VARIANTS
        self._warmed: set[str] = set()

    def play(self, batch: int, kind: Variant) -> Tensor:
        """Enqueue one step of the first `batch` rows; what `Sampler.draw` tells of them, on the device."""
        if self.graph:
            return self.graphs[self.ops].replay(batch, kind).tokens
        return self.step_of(self.ops)(self._slot_of_row[:batch], kind)[0]

    def step_of(self, ops: str) -> DecodeStep:
        """The decode step of one ops set, over one cache and state; its workspace is made once."""
        if ops not in self.steps:
            model, sampler, cache, state = self._parts
            self.steps[ops] = DecodeStep(model, load_ops(ops, pdl=self._config.pdl == "on"), sampler, cache, state)
        return self.steps[ops]

    @property
    def mode(self) -> tuple[str, bool]:
        """How decode steps are played now: the ops set's name, and whether graphs are replayed."""
        return self.ops, self.graph

    def playing(self) -> Playing:
        """The mode, and what it takes on this machine now. For the thread that calls `step`."""
        step, words = self.step_of(self.ops), {True: "on", False: "off"}
        refusals = [(ops, words[graph], self.refusal(ops, graph)) for ops in OPS_SETS for graph in (True, False)]
        return Playing(
            ops=self.ops,
            graph=words[self.graph],
            pdl=words[step.ops.pdl],
            kernels_per_layer=step.ops.kernels_per_layer,
            launches_per_layer=step.launches_per_layer,
            launches_per_step=step.launches,
            host_launches_per_step=1 if self.graph else step.launches,
            memory_used_bytes=used_bytes(self._slot_of_row.device),
            modes=tuple(Mode(ops, graph, refusal is None, refusal) for ops, graph, refusal in refusals),
        )

    def refusal(self, ops: str, graph: bool) -> str | None:
        """Why this engine cannot play a mode; None if it can."""
        if self._slot_of_row.device.type == "cuda" or (ops, graph) == ("unfused", False):
            return None
        return "fused kernels and graphs need a CUDA device; this engine runs on the CPU, with ops unfused and graph off"

    def prepare(self, every_mode: bool = False) -> Prepared:
        """Compile every kernel of every ops set this device can run, and capture the mode's graphs; for CUDA devices.

        Args:
            every_mode: capture the graphs of every ops set; else those of other modes are captured when first switched to.

        Raises:
            ConfigError: a capture failed and graphs were asked for; with graph "auto" the engine goes on eagerly and logs why.
        """
        start = time.perf_counter()
        for name in self.sets:
            self._warm(name)
        compiled = time.perf_counter()
        wanted = self._config.graph != "off"
        try:
            for name in OPS_SETS if every_mode else [self.ops] if wanted else []:
                self._capture(name)
            self.graph = wanted
        except ConfigError as error:
            if self._config.graph == "on":
                raise ConfigError(f"graph on was asked for and {error}; use --graph off") from error
            log.warning("graph off, decoding eagerly: %s", error)
            self.graphs.clear()
        return Prepared(compiled - start, time.perf_counter() - compiled)

    def switch(self, ops: str | None = None, graph: bool | None = None) -> float:
        """Change the mode between two steps; streams go on over the same cache. None keeps what is.

        Returns:
            Seconds the streams stood still, for graphs captured at a mode's first use.

        Raises:
            ConfigError: this device cannot play that mode, or its capture failed; the mode stays as it was.
        """
        ops, graph = ops or self.ops, self.graph if graph is None else graph
        refusal = self.refusal(ops, graph)
        if refusal is not None:
            raise ConfigError(refusal)
        start = time.perf_counter()
        if graph and ops not in self.graphs:
            self._warm(ops)
            self._capture(ops)
        self.ops, self.graph = ops, graph
        return time.perf_counter() - start

    @torch.inference_mode()
    def _warm(self, ops: str) -> None:
        """Play every batch size on idle rows, once: kernels are compiled, workspaces made; no cache and no state is touched."""
        if ops in self._warmed:
            return
        idle = torch.full_like(self._slot_of_row, -1)
        for batch in range(1, len(idle) + 1):
            for kind in self.kinds:
                self.step_of(ops)(idle[:batch], kind)
        self._warmed.add(ops)

    @torch.inference_mode()
    def _capture(self, ops: str) -> None:
        """Raises ConfigError if the device or a kernel refuses."""
        graphs = DecodeGraphs(self.step_of(ops), self._slot_of_row)
        try:
            graphs.capture(range(1, self._config.max_slots + 1), self.kinds)
        except RuntimeError as error:
            raise ConfigError(f"the capture of the {ops} graphs failed: {str(error).partition(chr(10))[0]}") from error
        self.graphs[ops] = graphs
