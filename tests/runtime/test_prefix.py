"""Prompts that begin as an earlier one did: what is taken over is right to the last position, and no answer changes."""

import random
from itertools import pairwise

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.request import Request, SamplingParams
from runtime.scheduler import Scheduler
from tests.checkpoints import tiny
from tests.runtime.engines import MODES, engine_over, recorded, some_ids
from tests.runtime.fake import VOCAB, FakeModel

SETTLED = dict(device="cpu", dtype="float32", ops="unfused", graph="off", pdl="off")


def fake(slots=2, max_len=64, **options):
    return Engine(FakeModel(), EngineConfig(**SETTLED, max_len=max_len, max_slots=slots, **options))


def drain(engine):
    events = []
    while engine.has_work:
        events += engine.step()
        assert_tape(engine)
    return events


def ask(engine, name, *ids, **options):
    """Run one more request to its end: its tokens, and how many prompt tokens were found in the cache."""
    engine.submit(Request(name, ids, **options))
    events = [event for event in drain(engine) if event.request_id == name]
    return [event.token for event in events], events[0].cached


def assert_tape(engine):
    """The fake model's K is the token id: every id that a slot is said to hold must stand there."""
    tape = engine.cache.k[0, :, 0, :, 0].int().tolist()
    for slot, held in enumerate(engine._scheduler._held):
        assert tape[slot][: len(held)] == held


def test_a_chat_goes_on_behind_what_its_slot_holds():
    """The last token of an answer was drawn and never written: it is computed with the next turn."""
    engine = fake()
    assert ask(engine, "a", 1, 2, 3, max_tokens=3) == ([4, 5, 6], 0)
    assert ask(engine, "b", 1, 2, 3, 4, 5, 6, 9, max_tokens=2) == ([10, 11], 5)
    assert ask(engine, "c", 1, 2, 3, 4, 9, max_tokens=1) == ([10], 4)


def test_a_prompt_that_is_held_to_its_end_has_its_last_token_computed_again():
    engine = fake(slots=1)
    ask(engine, "a", 1, 2, 3, 4, 5, max_tokens=3)
    assert ask(engine, "b", 1, 2, 3, max_tokens=2) == ([4, 5], 2)


def test_without_prefix_reuse_every_prompt_is_computed():
    engine = fake(prefix_reuse=False)
    for name in "abc":
        assert ask(engine, name, 1, 2, 3, max_tokens=3) == ([4, 5, 6], 0)


def test_a_prompt_that_is_scored_is_computed_whole():
    """Its tokens' log-probabilities come from hidden states, which no slot keeps."""
    engine = fake()
    ask(engine, "a", 1, 2, 3, max_tokens=3)
    engine.submit(Request("b", (1, 2, 3, 4), max_tokens=1, prompt_logprobs=0))
    (event,) = drain(engine)
    assert event.cached == 0
    assert len(event.prompt_logprobs) == 4


def test_what_the_caller_put_into_the_cache_is_not_mixed_with_what_the_engine_finds():
    with pytest.raises(RequestError, match="turn prefix_reuse off"):
        fake().submit(Request("a", (1, 2, 3), cached=2))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_busy_slot_is_copied_from_while_it_runs(ahead):
    engine = fake()
    engine._run_ahead = ahead
    engine.submit(Request("a", (1, 2, 3), max_tokens=20))
    events = [event for _ in range(4) for event in engine.step()]
    read = engine._scheduler._running[0].length
    engine.submit(Request("b", (1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=2))
    events += drain(engine)
    assert next(e.cached for e in events if e.request_id == "b") == read - 1
    assert [e.token for e in events if e.request_id == "b"] == [10, 11]
    assert [e.token for e in events if e.request_id == "a"] == [i % VOCAB for i in range(4, 24)]


def test_answers_to_one_prompt_compute_it_once():
    engine = fake(slots=4)
    for name in "abcd":
        engine.submit(Request(name, (1, 2, 3, 4, 5), SamplingParams(choice=ord(name)), max_tokens=3))
    events = drain(engine)
    assert {e.request_id: e.cached for e in events} == {"a": 0, "b": 4, "c": 4, "d": 4}
    assert all([e.token for e in events if e.request_id == name] == [6, 7, 8] for name in "abcd")


def test_of_a_prompt_cancelled_on_its_way_the_chunks_played_are_held():
    engine = fake(slots=1, prefill_chunk=2)
    engine.submit(Request("a", (1, 2, 3, 4, 5, 6, 7), max_tokens=2))
    engine.step(), engine.step()
    engine.cancel("a")
    assert ask(engine, "b", 1, 2, 3, 4, 5, 6, 7, max_tokens=1) == ([8], 4)


def test_nothing_is_kept_of_a_request_whose_logits_were_not_finite():
    engine = fake()
    engine.model.next_token = lambda i: -1 if i == 9 else i + 1
    ask(engine, "a", 7, 8, 9, max_tokens=3)
    assert ask(engine, "b", 7, 8, 5, max_tokens=1) == ([6], 0)


def test_the_slot_that_holds_most_is_taken_else_the_least_recently_used():
    scheduler = Scheduler(3, 100, prefix_reuse=True)

    def serve(*ids):
        scheduler.submit(Request("x", ids, max_tokens=1))
        (running,) = scheduler.admit()
        scheduler.begin(running)
        scheduler.advance(running, len(ids) - running.prefilled)
        scheduler.commit(running, 0)
        return running.slot, running.cached

    assert [serve(i, i, i) for i in (1, 2, 3)] == [(0, 0), (1, 0), (2, 0)]
    assert serve(2, 2, 2, 2) == (1, 3)
    assert serve(9, 9) == (0, 0)
    assert serve(8, 8) == (2, 0)


def test_a_greeting_in_common_is_copied_and_does_not_cost_another_chat_its_slot():
    """With two users and one chat template the second took the slot of the first, however many stood empty."""
    engine = fake(slots=3, max_len=64)
    ask(engine, "a", 1, 2, *range(10, 30), max_tokens=1)
    assert ask(engine, "b", 1, 2, 7, 7, max_tokens=1) == ([8], 2)
    assert ask(engine, "a2", 1, 2, *range(10, 30), 5, max_tokens=1) == ([6], 22)


def play(engine, seed, count, cancels=0.25):
    """Random chats that come, go on, repeat each other and are cancelled; the tokens of those that ran to their end."""
    rng = random.Random(seed)
    chats = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(5)]
    wanted, tokens, sent = {}, {}, 0
    while sent < count or engine.has_work:
        while sent < count and rng.random() < 0.3:
            chat = rng.choice(chats)
            prompt = chat[: rng.randrange(1, len(chat) + 1)] if rng.random() < 0.3 else chat
            prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randrange(3)))][:50]
            engine.submit(Request(str(sent), tuple(prompt), max_tokens=rng.randrange(1, 10), end_ids=(rng.randrange(VOCAB),)))
            wanted[str(sent)], tokens[str(sent)] = prompt, []
            sent += 1
        for event in engine.step():
            if event.token is not None:
                tokens[event.request_id].append(event.token)
            if event.finish is not None:
                said = wanted[event.request_id] + tokens[event.request_id]
                chats[rng.randrange(len(chats))] = said[:40]
            if event.finish == "cancelled":
                del tokens[event.request_id]
        assert_tape(engine)
        if tokens and rng.random() < cancels:
            engine.cancel(rng.choice(list(tokens)))
    return tokens


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_storm_of_chats_and_cancels_leaves_every_held_id_in_its_place(seed, ahead):
    engine = fake(slots=1 + seed % 4, prefill_chunk=1 + seed % 5)
    engine._run_ahead = ahead
    tokens = play(engine, seed, 120)
    assert len(tokens) > 20  # that were not cancelled
    for produced in tokens.values():
        assert all(after == (before + 1) % VOCAB for before, after in pairwise(produced))


# Real (tiny) decoders


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_chats_answer_as_they_do_without_reuse(tmp_path, mode, seed):
    """float32, greedy: rounding in another order never decides a token here."""

    def traffic(engine):
        rng, answers = random.Random(seed), []
        chats = [some_ids(rng.randrange(5, 120), seed * 10 + i) for i in range(4)]
        for turn in range(5):
            order = rng.sample(range(4), 4)
            names = {f"{turn}-{i}": i for i in order}
            for name, i in names.items():
                engine.submit(Request(name, chats[i], max_tokens=rng.randrange(1, 12)))
                for _ in range(rng.randrange(3)):  # some arrive while others run
                    answers += engine.step()
            while engine.has_work:
                answers += engine.step()
            for name, i in names.items():
                said = [e.token for e in answers if e.request_id == name]
                chats[i] = (*chats[i], *said, *some_ids(rng.randrange(1, 9), seed + turn))
            chats[order[0]] = chats[order[1]][: rng.randrange(1, 30)] + some_ids(20, turn)  # a new one, begun as another
        names = {e.request_id for e in answers}
        return {name: [(e.token, e.finish) for e in answers if e.request_id == name] for name in names}, answers

    engine = engine_over(tiny(tmp_path, dtype=torch.float32), mode, slots=3, prefill_chunk=64)
    with_reuse, answers = traffic(engine)
    without, fresh = traffic(engine_over(engine.model, mode, slots=3, prefill_chunk=64, prefix_reuse=False))
    assert with_reuse == without
    assert max(e.cached for e in answers) > 50
    assert not any(e.cached for e in fresh)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [1, 2])
def test_the_same_question_has_the_same_answer_bit_by_bit(tmp_path, mode, slots):
    """Asked again, a prompt had only its last token computed, whose logits differ in the last bits from those of the whole."""
    engine = engine_over(tiny(tmp_path), mode, slots=slots, prefill_chunk=64)
    prompt, other = some_ids(100, seed=3), some_ids(50, seed=4)
    answers = []
    for name in "abc":
        answers.append(recorded(engine, Request(name, prompt, max_tokens=12)))
        if slots == 2:  # another chat in the other slot
            engine.generate([Request("other" + name, other, max_tokens=4)])
    for tokens, logits in answers:
        assert tokens == answers[0][0]
        assert logits.equal(answers[0][1])
