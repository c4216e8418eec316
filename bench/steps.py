"""Owns whole decode steps played outside the engine: eagerly or as a graph, with any ops set, timed and seen launch by launch.

Does not own the loop that users meet (engine; bench.timing times it). A whole step reads every layer's weights, gigabytes of
them, so nothing it reads is in L2 from the step before.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench.output import Output
from bench.profiled import record
from models import Decoder, Loaded, ModelSource, find_model, load_engine
from models.quantized import settle_weights
from runtime.config import EngineConfig
from runtime.decode_graph import DecodeGraphs
from runtime.decode_step import pack
from runtime.device import resolve
from runtime.errors import DeviceError
from runtime.ops import Ops
from runtime.request import Request

Play = Callable[[], object]
ROOM = 128
"""Positions behind the context: every step takes one, and a reset begins again at the context."""


@dataclass(frozen=True)
class StepsOptions:
    """The flags of a command that plays whole steps; `config`: those that are fields of EngineConfig."""

    model: str
    revision: str | None
    random_weights: bool
    batch: tuple[int, ...]
    context: int
    config: dict[str, Any]
    output: Output
    flags: dict[str, Any]

    def source(self) -> ModelSource:
        """The model, its weights not fetched."""
        return find_model(self.model, self.revision, weights=False)

    def settled(self, source: ModelSource) -> EngineConfig:
        settled, _ = resolve(EngineConfig(**self.config), source.config.dtype)
        return replace(settled, weights=settle_weights(settled.weights, source.config.stored))

    def load(self) -> Loaded:
        """The model with slots and positions for steps of every batch; nothing is compiled or captured yet."""
        wish = EngineConfig(max_slots=max(self.batch), **self.config)
        source = find_model(self.model, self.revision, random_weights=self.random_weights)
        return load_engine(source, wish, self.context + ROOM, prepare=False)


class WholeSteps:
    """Steps of `batch` rows that begin at `context` positions of random K and V."""

    def __init__(self, loaded: Loaded, batch: int, context: int) -> None:
        engine = loaded.engine
        assert isinstance(engine.model, Decoder)
        self.batch, self.context, self.device = batch, context, engine.model.device
        self.attention = engine.model.layers[0].attention
        self._step = engine.modes.step_of("unfused")
        for cached in (engine.cache.k, engine.cache.v):
            cached.normal_()
        self._slots = torch.arange(batch, dtype=torch.int32, device=self.device)
        request = Request("bench", (0,) * context)
        self._start = torch.tensor([pack(request, 2**30)] * batch, dtype=torch.int32, device=self.device)

    def reset(self) -> None:
        """Every row at `context` again."""
        self._step.state.packed[: self.batch] = self._start

    @torch.inference_mode()
    def eager(self, ops: Ops) -> Play:
        """A call that enqueues one step; the first one, which compiles, has been played."""
        step = replace(self._step, ops=ops)

        def play() -> object:
            with torch.inference_mode():
                return step(self._slots, "plain")[1]

        self.reset()
        play()
        return play

    @torch.inference_mode()
    def graph(self, ops: Ops) -> Play:
        """A call that replays one step as a graph."""
        self.eager(ops)
        graphs = DecodeGraphs(replace(self._step, ops=ops), self._slots)
        graphs.capture([self.batch], ["plain"])
        return lambda: graphs.replay(self.batch, "plain").logits

    def ms(self, play: Play, steps: int = 20, reps: int = 5) -> list[float]:
        """Milliseconds a step of `steps` back to back, once for each rep."""
        found = []
        for _ in range(reps):
            self.reset()
            play()
            found.append(back_to_back_us(play, steps, self.device) / 1e3)
        return found

    def launches_us(self, play: Play, steps: int = 8) -> list[list[tuple[str, float]]]:
        """Of each step, name and microseconds of its kernels in order, from the profiler's raw events; for ops without PDL."""
        self.reset()
        play()

        events = record(lambda: [play() for _ in range(steps)], None, True)
        kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))
        named = fold([(str(e["name"]), float(e["dur"])) for e in kernels])
        each = len(named) // steps
        return [named[i * each : (i + 1) * each] for i in range(steps)]


class Resources(NamedTuple):
    """What a thread of a compiled Triton kernel takes: registers, and bytes spilled."""

    registers: int
    spills: int


def launched(play: Play) -> list[Resources]:
    """The resources of every Triton kernel that `play` launches, in order; `play` must not be a graph's replay."""
    from triton.runtime.jit import JITFunction

    run, kernels = JITFunction.run, []

    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, **kwargs))
        return kernels[-1]

    with patch.object(JITFunction, "run", kept):
        play()
    return [Resources(k.n_regs, k.n_spills) for k in kernels]


def fold(kernels: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Kernels with cuBLAS's second half of a split GEMM counted into the first: one launch of ours, two of the device's."""
    folded: list[tuple[str, float]] = []
    for name, us in kernels:
        if "splitk" in name.lower() and "reduce" in name.lower() and folded:
            folded[-1] = (folded[-1][0], folded[-1][1] + us)
        else:
            folded.append((name, us))
    return folded


def back_to_back_us(play: Play, calls: int, device: torch.device) -> float:
    """Microseconds a call of `calls` in a row: by CUDA events around all of them, or the wall clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            play()
        return (time.perf_counter() - start) * 1e6 / calls
    torch.cuda.synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        play()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / calls


def samples_us(play: Play, device: torch.device, reps: int = 9, sample_us: float = 5e3) -> list[float]:
    """Microseconds a call, once for each rep; a rep is as many calls back to back as take `sample_us`, at least one."""
    play()
    estimate = back_to_back_us(play, 1, device)
    calls = max(1, min(1000, int(sample_us / max(estimate, 1e-3))))
    return [back_to_back_us(play, calls, device) for _ in range(reps)]


def graph_of(play: Play, times: int) -> Play:
    """`play`, `times` in a row, as one graph's replay."""
    play()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            play()
    return graph.replay


def require_device(device: torch.device, error: Exception) -> None:
    """Told apart from what failed on its own: DeviceError if the device answers no more after `error`, as after a fault in a
    kernel, since then nothing else can run in this process."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise device_failed(error) from error


def device_failed(error: Exception) -> DeviceError:
    """One sentence for an error of CUDA's that stays."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return DeviceError(f"the device failed and nothing further can run in this process: {said}; run the command again")


def median(samples: list[float]) -> float:
    return float(statistics.median(samples))
