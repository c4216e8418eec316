"""Whole steps outside the engine: where they begin, how they are timed, what is seen of their launches."""

import time

import pytest
import torch

from bench.arithmetic import in_order, step_launches
from bench.kernels import launch_times
from bench.output import Output
from bench.steps import ROOM, StepsOptions, WholeSteps, back_to_back_us, launched, samples_us
from runtime.ops import load_ops

CPU = torch.device("cpu")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def steps_of(folder, device, batch=2, context=32):
    config = {"device": device, "dtype": "bfloat16"}
    loaded = StepsOptions(str(folder), None, True, (batch,), context, config, Output(), {}).load()
    return loaded, WholeSteps(loaded, batch, context)


def test_steps_begin_at_the_context_again_after_a_reset(folders):
    loaded, steps = steps_of(folders["llama"], "cpu")
    play, state = steps.eager(load_ops("unfused")), loaded.engine.state
    steps.reset()
    first = play().clone()
    assert state.position.tolist() == [33, 33]
    assert not torch.equal(play(), first)
    steps.reset()
    assert torch.equal(play(), first)
    assert loaded.engine.max_len >= 32 + ROOM
    assert all(ms > 0 for ms in steps.ms(play, steps=2, reps=2))


def test_a_delay_of_a_millisecond_shows_in_full():
    found = samples_us(lambda: time.sleep(0.001), CPU, reps=3, sample_us=5e3)
    assert len(found) == 3
    assert min(found) >= 1000
    assert back_to_back_us(lambda: time.sleep(0.001), 3, CPU) >= 1000


@pytest.mark.parametrize("batch", [1, 2])
class TestOnAGpu:
    pytestmark = gpu

    def test_every_launch_of_a_fused_step_has_its_times_and_resources(self, folders, batch):
        loaded, steps = steps_of(folders["llama"], "cuda", batch)
        plan = step_launches(loaded.source.config, "bfloat16", batch, 32, "fused")
        times = launch_times(steps, plan, steps.graph(load_ops("fused", pdl=False)))
        assert isinstance(times, dict), times
        assert set(times) == {each.name for each in plan}
        taken = launched(steps.eager(load_ops("fused", pdl=False)))
        assert len(taken) == len(in_order(plan))
        assert all(each.registers > 0 for each in taken)

    def test_a_graph_gives_the_eager_steps_logits(self, folders, batch):
        _, steps = steps_of(folders["qwen3"], "cuda", batch)
        found = []
        for make in (steps.eager, steps.graph):
            play = make(load_ops("fused", pdl=False))
            steps.reset()
            found.append(play().clone())
        assert torch.equal(*found)
