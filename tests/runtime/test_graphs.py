"""Decode steps captured in CUDA graphs: what a replay reads and writes, what disturbs a capture, and the change of modes."""

import gc
import logging
import random
import sys
from collections import Counter
from threading import Event, Thread
from unittest.mock import patch

import pytest
import torch

from runtime.decode_step import pack
from runtime.errors import ConfigError
from runtime.request import Request, SamplingParams
from runtime.sampling import VARIANTS
from tests.checkpoints import tiny
from tests.rule_n import assert_greedy, open_model
from tests.runtime.engines import engine_over, some_ids

pytestmark = pytest.mark.gpu

SLOTS = 16
SLACK = 64 << 20
"""Bytes that torch's allocator may keep for itself."""
SAMPLED = SamplingParams(temperature=0.7, seed=5)
FILTERED = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=6)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def decoder(path):
    return open_model(path, device="cuda")


def poison(engine, batch, kind):
    """Spoil every static buffer that a step of this size must write before it reads; counters rest at zero."""
    ops = engine.modes.ops
    graph = engine.modes.graphs[ops]._graphs[batch, kind]
    step = engine.modes.step_of(ops)
    buffers = [graph.tokens, graph.logits, engine.modes._slot_of_row[batch:]]
    if ops == "fused":
        buffers += [tensor for (name, *_), tensor in step.ops._buffers.items() if name != "counter"]
        buffers += [tensor for scratch in step.ops._scratch.values() for tensor in (scratch.partial, scratch.stats)]
        buffers += [tensor for scaled in step.ops._scaled.values() for tensor in (scaled.x, scaled.squares)]
    for buffer in buffers:
        buffer.fill_(torch.nan if buffer.is_floating_point() else 511)


def snapshot(engine):
    return [tensor.clone() for tensor in (engine.state.packed, engine.cache.k, engine.cache.v)]


def restore(engine, saved):
    for tensor, old in zip((engine.state.packed, engine.cache.k, engine.cache.v), saved, strict=True):
        tensor.copy_(old)


@pytest.mark.parametrize("ops", ["fused", "unfused"])
@torch.inference_mode()
def test_a_replay_is_the_eager_step_bit_for_bit_and_writes_one_position_of_each_live_slot(decoder, ops):
    """Every batch size and kind of draw, with idle rows, a slot that is done and poisoned buffers."""
    engine = engine_over(decoder, ("cuda", ops, "on"), slots=SLOTS)
    params = {"plain": (SamplingParams(), SAMPLED), "full": (SamplingParams(), SAMPLED, FILTERED)}
    lengths = [1 + 23 * slot for slot in range(SLOTS)]
    for slot, length in enumerate(lengths):
        ids = torch.tensor(some_ids(length, seed=slot), device="cuda")
        decoder.prefill(ids, 0, slot, engine.cache)
    rng = random.Random(0)
    for kind in VARIANTS:
        for slot, length in enumerate(lengths):
            words = pack(Request("x", (1,) * length, params[kind][slot % len(params[kind])]), limit=500)
            engine.state.packed[slot] = torch.tensor(words, dtype=torch.int32)
            engine.state.token[slot] = 3 * slot
        engine.state.done[5] = 1
        saved = snapshot(engine)
        for batch in range(1, SLOTS + 1):
            slots = rng.sample(range(SLOTS), batch)
            if batch % 3 == 0:
                slots[rng.randrange(batch)] = -1
            live = [row for row, slot in enumerate(slots) if slot not in (-1, 5)]
            engine.modes._slot_of_row[:batch] = torch.tensor(slots, dtype=torch.int32)
            tokens, logits = (t.clone() for t in engine.modes.step_of(ops)(engine.modes._slot_of_row[:batch], kind))
            eager = snapshot(engine)
            restore(engine, saved)
            poison(engine, batch, kind)
            graph = engine.modes.graphs[ops].replay(batch, kind)
            drawn, wanted = (told.view(batch, -1)[live, 0] for told in (graph.tokens, tokens))  # full draws tell more
            assert drawn.equal(wanted)
            assert graph.logits[live].equal(logits[live])
            assert all(ours.equal(theirs) for ours, theirs in zip(snapshot(engine), eager, strict=True))
            for cache, old in ((engine.cache.k, saved[1]), (engine.cache.v, saved[2])):
                for row in live:
                    old[:, slots[row], :, lengths[slots[row]]] = cache[:, slots[row], :, lengths[slots[row]]]
                assert cache.equal(old)
            restore(engine, saved)


@pytest.mark.parametrize("ops", ["fused", "unfused"])
def test_five_then_three_then_seven_then_one_request_read_nothing_of_what_was_left_behind(path, decoder, ops):
    """A batch padded up to a captured size, or an input left out at a replay, kept old values."""
    engine = engine_over(decoder, ("cuda", ops, "on"), slots=8, prefix_reuse=False)
    play, sizes = engine.modes.play, []

    def poisoned(batch, kind):
        sizes.append(batch)
        poison(engine, batch, kind)
        return play(batch, kind)

    def run():
        lengths = [30, 10, 30, 10, 50]
        events, late = [], range(4)
        for i, length in enumerate(lengths):
            engine.submit(Request(str(i), some_ids(20 + i, seed=i), max_tokens=length))
        while engine.has_work:
            events += engine.step()
            for i in late if len(events) >= 70 else ():
                engine.submit(Request(f"late {i}", some_ids(40 + i, seed=i), max_tokens=10))
                late = ()
        return {name: [e.token for e in events if e.request_id == name] for name in {e.request_id for e in events}}

    plain = run()
    with patch.object(engine.modes, "play", poisoned):
        assert run() == plain
    assert {1, 3, 5, 7} < set(sizes)
    for i in range(5):
        assert_greedy(path, some_ids(20 + i, seed=i), plain[str(i)], torch.bfloat16)


def test_tokens_and_slots_cross_unharmed_however_late_the_device_is(decoder):
    """A pinned buffer that was written again while its copy waited, or read before its copy had landed, gave wrong tokens now
    and then."""
    engine = engine_over(decoder, ("cuda", "fused", "on"), slots=4, prefix_reuse=False)
    play, prefill = engine.modes.play, decoder.prefill

    def run(before=lambda: None, after=lambda: None):
        def slow(call):
            def called(*arguments):
                before()
                result = call(*arguments)
                after()
                return result

            return called

        tokens = Counter()
        told = []
        with patch.object(engine.modes, "play", slow(play)), patch.object(decoder, "prefill", slow(prefill)):
            for i in range(4):
                engine.submit(Request(str(i), some_ids(10 + i, seed=i), SAMPLED, max_tokens=200 - 30 * i))
            while engine.has_work:
                for event in engine.step():
                    tokens[event.request_id] += 1
                    told.append((event.request_id, event.token))
                    if event.request_id == "0" and tokens["0"] % 20 == 0:
                        engine.submit(Request(f"late {tokens['0']}", some_ids(9, seed=tokens["0"]), max_tokens=7))
        return told

    wanted = run()
    assert len(wanted) > 600
    for _ in range(3):
        assert run(before=lambda: torch.cuda._sleep(10_000_000)) == wanted  # about 5 ms
    assert run(before=torch.cuda.synchronize, after=torch.cuda.synchronize) == wanted


def test_another_thread_may_use_the_device_while_graphs_are_captured(decoder):
    """Copies and waits of another thread ruined a capture. It waits for its stream: CUDA itself ends every capture at a
    wait for the whole device."""
    engine = engine_over(decoder, ("cuda", "fused", "on"), slots=4)
    wanted = engine.generate([Request("a", some_ids(9, 1), max_tokens=8)])
    done, faults, rounds = Event(), [], 0

    def disturb():
        nonlocal rounds
        try:
            while not done.is_set():
                there = torch.ones(1 << 16).pin_memory().to("cuda", non_blocking=True)
                torch.cuda.current_stream().synchronize()
                assert float(there.sum()) == 1 << 16
                rounds += 1
        except Exception as error:
            faults.append(error)

    thread = Thread(target=disturb)
    thread.start()
    try:
        for _ in range(3):
            engine.modes._capture("fused")
    finally:
        done.set()
        thread.join()
    assert not faults
    assert rounds > 0
    assert engine.generate([Request("a", some_ids(9, 1), max_tokens=8)]) == wanted


def test_memory_and_graphs_stay_as_they_are_over_500_requests_of_every_length(decoder):
    """Memory climbed with every new shape."""
    engine = engine_over(decoder, ("cuda", "fused", "on"), slots=8, prefill_chunk=128)
    rng, after_50 = random.Random(0), 0
    for i, length in enumerate(rng.sample(range(1, 501), 500)):
        engine.submit(Request(str(i), some_ids(length, seed=i), rng.choice((SamplingParams(), FILTERED)), rng.randrange(1, 9)))
        while engine.num_waiting > 4 or (i == 499 and engine.has_work):
            engine.step()
        if i == 50:
            after_50, graphs = torch.cuda.memory_reserved(), len(engine.modes.graphs["fused"])
    assert torch.cuda.memory_reserved() <= after_50 + SLACK
    assert len(engine.modes.graphs["fused"]) == graphs == 8 * len(VARIANTS)


def test_an_engine_that_is_dropped_gives_its_memory_back(decoder):
    """Five times: its graphs' pools, caches and workspaces."""

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = reserved()
    for _ in range(5):
        engine = engine_over(decoder, ("cuda", "fused", "on"), slots=8)
        engine.modes.switch("unfused")
        engine.generate([Request("a", some_ids(9, 1), max_tokens=8)])
        del engine
    assert reserved() <= before + SLACK


MODES = [("fused", True), ("unfused", False), ("fused", False), ("unfused", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streams_whose_mode_changes_under_way_say_what_they_would_have_said(tmp_path, dtype):
    """In float32 rounding decides nothing here and the texts are equal; in bfloat16 wherever rule N decides."""
    path = tiny(tmp_path, dtype=dtype)
    engine = engine_over(path, ("cuda", "fused", "on"), slots=4, prefix_reuse=False)
    prompts = [some_ids(20 + 30 * i, seed=i) for i in range(4)]

    def run(switching):
        tokens = {str(i): [] for i in range(4)}
        for name, prompt in zip(tokens, prompts, strict=True):
            engine.submit(Request(name, prompt, max_tokens=80))
        step = 0
        while engine.has_work:
            if switching and step % 5 == 0:
                engine.modes.switch(*MODES[step // 5 % len(MODES)])
            for event in engine.step():
                tokens[event.request_id].append(event.token)
            step += 1
        return tokens

    unswitched, switched = run(False), run(True)
    if dtype == torch.float32:
        assert switched == unswitched
    for name, prompt in zip(switched, prompts, strict=True):
        assert_greedy(path, prompt, switched[name], dtype)


def test_nothing_is_compiled_once_the_engine_is_ready(tmp_path):
    """A kernel compiled at its first use stops every stream for a second. Mixed traffic through all modes, of a shape that no
    other test has."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    odd = dict(hidden_size=192, intermediate_size=208, vocab_size=3001, num_attention_heads=6, num_key_value_heads=3)
    modules = [module for name, module in sys.modules.items() if name.startswith("runtime.ops")]
    for kernel in (value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)):
        kernel.device_caches.clear()  # what other tests have compiled
    compiled = []
    with patch.object(knobs.compilation, "listener", lambda *_, **told: compiled.append(str(told.get("src")))):
        engine = engine_over(tiny(tmp_path, **odd), ("cuda", "fused", "on"), slots=5, prefill_chunk=64)
        assert compiled, "the listener hears nothing"
        compiled.clear()
        rng = random.Random(0)
        for i in range(60):
            params = rng.choice((SamplingParams(), SAMPLED, FILTERED))
            ends = tuple(some_ids(rng.randrange(4), seed=i))
            engine.submit(Request(str(i), some_ids(rng.randrange(1, 300), i), params, rng.randrange(1, 12), end_ids=ends))
            for _ in range(rng.randrange(6)):
                engine.step()
            if i % 7 == 0:
                engine.modes.switch(*MODES[i // 7 % len(MODES)])
            if i % 11 == 0:
                engine.cancel(str(i - 1))
        while engine.has_work:
            engine.step()
    assert not compiled


def raised():
    raise RuntimeError("no such thing here")


@pytest.mark.parametrize("fault", [raised, lambda: torch.zeros(1, device="cuda").item()], ids=["raises", "synchronizes"])
def test_a_capture_that_fails_leaves_an_eager_engine_and_its_memory_behind(decoder, caplog, fault):
    """An error in a capture kept its memory pool for ever."""
    decode = decoder.decode

    def failing(*arguments):
        if torch.cuda.is_current_stream_capturing():
            fault()
        return decode(*arguments)

    wanted = engine_over(decoder, ("cuda", "fused", "off"), slots=4).generate([Request("a", some_ids(9, 1), max_tokens=8)])
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with patch.object(decoder, "decode", failing):
        with pytest.raises(ConfigError, match="graph on was asked for and the capture of the fused graphs failed"):
            engine_over(decoder, ("cuda", "fused", "on"), slots=4)
        with caplog.at_level(logging.WARNING, "runtime.modes"):
            engine = engine_over(decoder, ("cuda", "fused", "auto"), slots=4)
    assert "graph off, decoding eagerly: the capture of the fused graphs failed: " in caplog.text
    caplog.clear()  # it keeps the error, which keeps what failed
    assert engine.modes.mode == ("fused", False)
    assert engine.generate([Request("a", some_ids(9, 1), max_tokens=8)]) == wanted
    engine.modes.switch(graph=True)  # the fault is gone: a later capture works
    assert engine.generate([Request("a", some_ids(9, 1), max_tokens=8)]) == wanted
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + SLACK
