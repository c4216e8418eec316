"""The engine's loop over a fake decoder: who runs when, what ends a request, what is told."""

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import ContextLengthError, RequestError
from runtime.request import Request, SamplingParams, TokenEvent
from tests.runtime.fake import VOCAB, FakeModel

SETTLED = dict(device="cpu", dtype="float32", ops="unfused", graph="off", pdl="off")


def make(model=None, max_len=16, max_slots=2, **options):
    return Engine(model or FakeModel(), EngineConfig(**SETTLED, max_len=max_len, max_slots=max_slots, **options))


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def test_a_request_runs_to_max_tokens_and_says_length_on_its_last_token():
    events = run(make(), Request("a", (3, 4), max_tokens=3))
    assert events == [TokenEvent("a", 5), TokenEvent("a", 6), TokenEvent("a", 7, "length")]


def test_an_end_id_is_produced_and_ends_the_request():
    events = run(make(), Request("a", (3,), max_tokens=9, end_ids=(6,)))
    assert [(e.token, e.finish) for e in events] == [(4, None), (5, None), (6, "stop")]


def test_min_tokens_keeps_end_ids_from_being_drawn():
    tokens = make(FakeModel(lambda i: 6)).generate([Request("a", (3,), max_tokens=9, min_tokens=3, end_ids=(6,))])["a"]
    assert 6 not in tokens[:3]
    assert tokens[3:] == [6]


@pytest.mark.parametrize(("prompt", "produced"), [(12, 4), (15, 1)])
def test_the_context_ends_an_answer_at_its_last_position(prompt, produced):
    events = run(make(), Request("a", (1,) * prompt, max_tokens=100))
    assert len(events) == produced
    assert events[-1].finish == "length"


def test_a_prompt_that_fills_the_context_is_refused_with_both_counts():
    with pytest.raises(ContextLengthError, match=r"context length is 16 tokens, .* the prompt has 16 tokens"):
        make().submit(Request("a", (1,) * 16))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        make().submit(Request("a", (token,)))


def test_a_third_request_waits_for_one_of_two_slots():
    engine = make()
    for name in "abc":
        engine.submit(Request(name, (1,), max_tokens=4))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    events = []
    while engine.has_work:
        events += engine.step()
    assert events[-1] == TokenEvent("c", 5, "length")


def test_a_long_prompt_is_computed_in_chunks_while_others_keep_their_pace():
    engine = make(prefill_chunk=2)
    engine.submit(Request("short", (1,), max_tokens=8))
    engine.step()
    engine.submit(Request("long", tuple(range(20, 27)), max_tokens=1))
    told = [[e.request_id for e in engine.step()] for _ in range(5)]
    assert told == [["short"], ["short"], ["short"], ["long", "short"], ["short"]]


def test_a_stream_ticks_in_every_step_while_many_prompts_arrive():
    """The step that computed a prompt's last chunk played no decode step: each arrival cost the others a chunk more."""
    engine = make(max_slots=16)
    engine.submit(Request("first", (1,), max_tokens=14))
    engine.step()
    for i in range(12):
        engine.submit(Request(f"next {i}", (1, 2), max_tokens=1))
    told = [[e.request_id for e in engine.step()] for i in range(12)]
    assert told == [[f"next {i}", "first"] for i in range(12)]


def test_prefill_begins_behind_what_is_cached():
    model, starts = FakeModel(), []
    inner = model.prefill
    model.prefill = lambda ids, start, *rest: starts.append((start, ids.tolist())) or inner(ids, start, *rest)
    engine = make(model, prefill_chunk=2, prefix_reuse=False)
    engine.cache.k[0, :, 0, :2, 0] = 9.0
    assert [e.token for e in run(engine, Request("a", (1, 2, 3, 4, 5), max_tokens=2, cached=2))] == [6, 7]
    assert starts == [(2, [3, 4]), (4, [5])]
    assert engine.cache.k[0, :, 0, :6, 0].amax(0).tolist() == [9, 9, 3, 4, 5, 6]


@pytest.mark.parametrize("cached", [-1, 3, 4])
def test_a_prompt_that_is_cached_to_its_end_is_refused(cached):
    """Its last token must be computed: the first answer token is drawn from its logits."""
    with pytest.raises(RequestError, match=f"cached is {cached}; it must be 0 or above and leave one of 3 tokens"):
        make().submit(Request("a", (1, 2, 3), cached=cached))


def test_cancelling_frees_the_slot_within_one_step_and_drops_later_tokens():
    engine = make(max_slots=1)
    engine.submit(Request("a", (1,), max_tokens=9))
    engine.submit(Request("b", (7,), max_tokens=1))
    engine.step()
    engine.cancel("a")
    assert engine.step() == [TokenEvent("a", None, "cancelled"), TokenEvent("b", 8, "length")]
    assert not engine.has_work


def test_a_waiting_request_can_be_cancelled_and_an_unknown_one_passes():
    engine = make(max_slots=1)
    engine.submit(Request("a", (1,), max_tokens=2))
    engine.submit(Request("b", (1,), max_tokens=2))
    engine.cancel("b")
    engine.cancel("nobody")
    events = run(engine)
    assert [e.request_id for e in events if e.token is not None] == ["a", "a"]


def test_a_row_with_logits_that_are_not_finite_ends_alone_with_an_error():
    """A float16 run of a model that overflows used to answer with a row of token 0."""
    model = FakeModel(lambda i: -1 if i == 9 else i + 1)
    events = run(make(model), Request("bad", (8,), max_tokens=4), Request("good", (1,), max_tokens=3))
    bad = [e for e in events if e.request_id == "bad"]
    assert [(e.token, e.finish) for e in bad] == [(9, None), (None, "error")]
    assert "not finite" in bad[-1].message
    assert [e.token for e in events if e.request_id == "good"] == [2, 3, 4]


def test_a_step_in_flight_behind_an_end_writes_nothing():
    """With a step enqueued ahead, the row of a finished slot must be idle on the device before the host knows."""
    engine = make()
    engine._run_ahead = 1  # what CUDA does
    events = run(engine, Request("a", (3,), max_tokens=2), Request("b", (20,), max_tokens=6))
    assert [e.token for e in events if e.request_id == "a"] == [4, 5]
    assert [e.token for e in events if e.request_id == "b"] == [21, 22, 23, 24, 25, 26]
    tape = engine.cache.k[0, :, 0, :, 0]
    assert tape[0, :3].tolist() == [3, 4, 0]  # the last token is never written, nor anything behind it
    assert any(-1 in batch for batch in engine.model.batches)


def test_tokens_in_flight_of_a_cancelled_request_are_not_told():
    engine = make()
    engine._run_ahead = 1
    engine.submit(Request("a", (1,), max_tokens=9))
    engine.step(), engine.step()
    engine.cancel("a")
    assert [e.token for e in engine.step()] == [None]
    assert not engine.has_work


def test_a_slot_serves_its_next_owner_as_if_new():
    engine = make(max_slots=1)
    first = engine.generate([Request("b", (5,), max_tokens=3)])
    engine.generate([Request("a", tuple(range(12)), max_tokens=4)])
    assert engine.generate([Request("b", (5,), max_tokens=3)]) == first


def test_a_seed_gives_the_same_tokens_alone_and_in_company():
    flat = lambda i: 0  # noqa: E731 - one logit of 10 among zeros, drowned by the temperature
    params = SamplingParams(temperature=50.0, seed=7)
    alone = make(FakeModel(flat)).generate([Request("a", (1,), params, max_tokens=8)])["a"]
    company = make(FakeModel(flat)).generate(
        [Request("x", (2,), SamplingParams(temperature=50.0, seed=8), max_tokens=5), Request("a", (1,), params, max_tokens=8)]
    )["a"]
    assert alone == company
    assert len(set(alone)) > 1


def test_the_cache_is_sized_by_the_config():
    engine = make(max_len=10, max_slots=3)
    assert engine.cache.k.shape == (1, 3, 1, 10, 2)
    assert engine.cache.nbytes == 2 * 3 * 10 * 2 * torch.float32.itemsize
