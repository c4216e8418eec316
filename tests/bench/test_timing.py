"""The clock: what counts as prefill, as decode and as end to end, and that nothing is timed short."""

import statistics
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bench.__main__ import _matrix, parser
from bench.ceiling import Ceiling
from bench.contenders import EngineRun, needed_len
from bench.latency import LatencyOptions
from bench.report import above_ceiling
from bench.timing import Cell, Shape, measure, play
from models import find_model, load_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import DeviceError, RequestError
from tests.runtime.fake import FakeModel


class Scripted:
    """A contender whose steps take times from a list, on a clock that it moves itself."""

    ops, graph = "unfused", "off"

    def __init__(self, steps, broken=False):
        self.now = 100.0
        self.calls = []
        self._script = steps
        self._broken = broken

    def clock(self):
        return self.now

    def prepare(self, shape, seed):
        self.now += 7.0  # not timed
        self.calls.append("prepare")
        self._steps = iter(self._script)

    def submit(self):
        self.calls.append("submit")

    def advance(self):
        seconds, streams = next(self._steps)
        self.now += seconds
        if self._broken:
            raise RequestError("not finite")
        return streams

    def finish(self):
        self.now += 7.0
        self.calls.append("finish")


def engine(model, batch, capacity, chunk=8):
    sizes = dict(max_len=capacity, max_slots=batch, prefill_chunk=chunk)
    return Engine(model, EngineConfig("cpu", "float32", "unfused", "off", "off", prefix_reuse=False, **sizes))


def test_prefill_stays_out_of_the_decode_rate():
    """Two rates that others have mixed up: 16 tokens after a prompt of 1024 that takes 500 ms, then one each 10 ms."""
    contender = Scripted([(0.5, [0])] + [(0.01, [0])] * 15)
    done = measure(contender, Shape(1, 1024, 16, 0), 0, contender.clock)
    assert done.first == pytest.approx((0.5,))
    assert done.gaps == pytest.approx([0.01] * 15)
    assert done.tpot == pytest.approx(0.010)
    assert done.decode_rate == pytest.approx(100.0)
    assert done.end_to_end_rate == pytest.approx(16 / 0.65)
    assert done.prefill_rate == pytest.approx(2048)
    assert contender.calls == ["prepare", "submit", "finish"]


def test_steps_without_a_token_belong_to_the_next_gap():
    contender = Scripted([(0.1, []), (0.1, [0]), (0.01, []), (0.01, [0]), (0.02, [0])])
    done = measure(contender, Shape(1, 8, 3, 0), 0, contender.clock)
    assert done.first == pytest.approx((0.2,))
    assert done.gaps == pytest.approx([0.02, 0.02])


def test_a_batch_decodes_from_the_moment_its_last_stream_has_a_token():
    steps = [(0.1, [0]), (0.1, [0, 1])] + [(0.01, [0, 1])] * 3
    contender = Scripted(steps)
    done = measure(contender, Shape(2, 8, 4, 0), 0, contender.clock)
    assert done.first == pytest.approx((0.1, 0.2))
    assert done.decode_tokens == 6
    assert done.decode_rate == pytest.approx(200)
    assert done.tpot == pytest.approx(0.01)
    assert done.prefill_rate == pytest.approx(80)


def test_a_second_token_told_with_the_first_is_not_a_gap_of_zero():
    contender = Scripted([(0.1, [0, 0]), (0.01, [0]), (0.01, [0])])
    done = measure(contender, Shape(1, 8, 4, 0), 0, contender.clock)
    assert done.gaps == pytest.approx([0.01, 0.01])
    assert done.tpot == pytest.approx(0.01)


def test_a_failed_pass_is_dropped_and_cleaned_up():
    contender = Scripted([(0.1, [0])], broken=True)
    with pytest.raises(RequestError, match="not finite"):
        measure(contender, Shape(1, 8, 4, 0), 0, contender.clock)
    assert contender.calls[-1] == "finish"


def test_the_prompt_is_computed_once_a_pass_and_every_stream_lives_to_the_end():
    prefilled, model = [], FakeModel()
    inner = model.prefill
    model.prefill = lambda ids, start, slot, cache: prefilled.append((slot, start, len(ids))) or inner(ids, start, slot, cache)
    shape = Shape(batch=3, prompt_len=20, gen_len=6, depth=0)
    run = EngineRun(engine(model, 3, needed_len(shape, 8)), "unfused", "off")
    for seed in range(2):
        prefilled.clear()
        done = measure(run, shape, seed)
        assert sum(length for _, _, length in prefilled) == 3 * 20
        # The steps in which every stream has its row are the ones that are timed.
        assert {len(rows) for rows in model.batches[-len(done.gaps) :]} == {3}
        assert done.decode_tokens == 3 * len(done.gaps)
        assert not run.engine.has_work


def test_the_doors_engines_reuse_no_prefix():
    (wish,) = _matrix(LatencyOptions, parser().parse_args(["latency"]), 1).wishes
    assert not wish.prefix_reuse


def test_prompts_differ_from_pass_to_pass():
    """A prompt that comes again might be answered from what its slot still holds."""
    shape, prompts, model = Shape(1, 8, 3, 0), [], FakeModel()
    inner = model.prefill
    model.prefill = lambda ids, *rest: prompts.append(ids.tolist()) or inner(ids, *rest)
    run = EngineRun(engine(model, 1, needed_len(shape, 8)), "unfused", "off")
    measure(run, shape, 0)
    measure(run, shape, 1)
    assert prompts[0] != prompts[1]


def test_depth_fills_the_cache_in_place_of_prefilling():
    starts, model = [], FakeModel()
    inner = model.prefill
    model.prefill = lambda ids, start, *rest: starts.append((start, len(ids))) or inner(ids, start, *rest)
    shape = Shape(batch=2, prompt_len=5, gen_len=4, depth=11)
    run = EngineRun(engine(model, 2, needed_len(shape, 8)), "unfused", "off")
    measure(run, shape, 0)
    assert starts == [(11, 5), (11, 5)]
    assert (run.engine.cache.k[..., :11, :] != 0).all()
    assert (run.engine.cache.v[..., :11, :] != 0).all()
    starts.clear()
    measure(run, replace(shape, depth=0), 1)
    assert starts == [(0, 5), (0, 5)]


@pytest.mark.parametrize("seconds", [0.001, 0.005])
def test_a_delay_in_the_step_shows_up_in_full(seconds):
    """A clock that stops before the step has ended would miss it."""
    model = FakeModel()
    inner = model.decode
    model.decode = lambda *args: time.sleep(seconds) or inner(*args)
    shape = Shape(1, 8, 10, 0)
    done = measure(EngineRun(engine(model, 1, needed_len(shape, 8)), "unfused", "off"), shape, 0)
    assert min(done.gaps) >= seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_delay_kernel_in_the_step_shows_up_in_full_and_agrees_with_cuda_events(folders):
    """Timing the launches alone would miss work that the device has yet to do."""
    config = EngineConfig("cuda", "bfloat16", "unfused", "off", "off", max_len=128, max_slots=1)
    loaded = load_engine(find_model(str(folders["llama"]), random_weights=True), config)
    model, events, cycles = loaded.engine.model, [], 20_000_000  # longer than the host takes to launch a step
    inner = model.decode

    def decode(*args):
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        torch.cuda._sleep(cycles)
        return inner(*args)

    model.decode = decode
    run, shape = EngineRun(loaded.engine, "unfused", "off"), Shape(1, 8, 60, 0)
    measure(run, shape, 0)
    events.clear()
    done = measure(run, shape, 1)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    delay = start.elapsed_time(end) / 1e3
    device = statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3
    timed = statistics.median(done.gaps)
    print(f"delay {1e3 * delay:.3f} ms, by events {1e3 * device:.3f}, timed {1e3 * timed:.3f} ms a token")
    assert timed >= 0.99 * delay
    assert timed == pytest.approx(device, rel=0.01)


def cell(contender, batch=1):
    return Cell(contender, Shape(batch, 8, 3, 0), step_bytes=2_000_000, weight_bytes=1_000_000)


def test_cells_take_turns_and_warm_up_does_not_count():
    order = []

    class Named(Scripted):
        def prepare(self, shape, seed):
            order.append((self.name, seed))
            super().prepare(shape, seed)

    cells = []
    for name in "ab":
        contender = Named([(0, [0])] * 3)
        contender.name = name
        cells.append(cell(contender))
    assert play(cells, reps=2, warmup=1, say=lambda text: None)
    assert [name for name, _ in order] == ["a", "b"] * 3
    assert len({seed for _, seed in order}) == 6
    assert [len(each.passes) for each in cells] == [2, 2]


def test_a_failed_pass_is_counted_apart_and_the_others_go_on():
    good, bad = cell(Scripted([(0, [0])] * 3)), cell(Scripted([(0, [0])], broken=True))
    assert play([bad, good], reps=2, warmup=0, say=lambda text: None)
    assert (len(bad.passes), len(bad.failures)) == (0, 2)
    assert (len(good.passes), len(good.failures)) == (2, 0)


def test_a_failed_device_ends_the_run():
    class Dead(Scripted):
        def advance(self):
            raise DeviceError("the device failed")

    dead, never = cell(Dead([])), cell(Scripted([(0, [0])] * 3))
    assert not play([dead, never], reps=1, warmup=0, say=lambda text: None)
    assert len(dead.failures) == 1
    assert never.passes == []


def test_a_rate_above_the_floor_is_warned_of():
    contender = Scripted([(0.1, [0]), (0.001, [0]), (0.001, [0])])
    measured = cell(contender)
    measured.passes.append(measure(contender, measured.shape, 0, contender.clock))
    assert above_ceiling(measured, Ceiling(2 / 0.9, "given", None)) is None
    assert "the clock is wrong" in above_ceiling(measured, Ceiling(2 / 1.1, "given", None))
