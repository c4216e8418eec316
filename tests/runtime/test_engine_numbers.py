"""The engine over real (tiny) decoders: what a slot held before must not matter, and draws must follow the logits."""

import pytest
import torch

from runtime.request import Request, SamplingParams
from tests.checkpoints import fixed, tiny
from tests.rule_n import assert_greedy, hugging_face, judge
from tests.runtime.engines import MODES, engine_over, recorded, some_ids

SHORT = some_ids(5, seed=2)
LONG = some_ids(300, seed=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny"))


def serve(engine, prompt, aborted=0):
    """Run a request to its end, or drop it half-way: while its prompt is computed, or while it decodes."""
    engine.submit(Request("a", prompt, max_tokens=20))
    for _ in range(aborted):
        engine.step()
    engine.cancel("a" if aborted else "nobody")
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_short_request_after_a_long_one_has_the_logits_it_has_alone(path, mode):
    """A short prompt in a slot that a longer one had used saw its old keys, and could answer the earlier user's text."""
    engine = engine_over(path, mode, prefill_chunk=128, prefix_reuse=False)
    alone = recorded(engine, Request("b", SHORT, max_tokens=8))
    for prompt in (LONG, SHORT[:3] + LONG, SHORT + LONG):
        for aborted in (0, 2, 6):
            serve(engine, prompt, aborted)
            tokens, logits = recorded(engine, Request("b", SHORT, max_tokens=8))
            assert tokens == alone[0]
            assert logits.equal(alone[1])
    engine = engine_over(engine.model, mode, prefill_chunk=128)
    serve(engine, LONG)  # nothing in common: nothing is reused
    assert recorded(engine, Request("b", SHORT, max_tokens=8))[1].equal(alone[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [3, 256, 300])
def test_a_request_that_goes_on_behind_another_ones_prefix_agrees_by_rule_n(path, mode, shared):
    """Whether the other ended, was dropped on its way, or still runs."""
    engine = engine_over(path, mode, slots=2, prefill_chunk=128)
    prompt = LONG[:shared] + SHORT
    for aborted in (0, 2, 6):
        serve(engine, LONG + SHORT, aborted)
        tokens, logits = recorded(engine, Request("b", prompt, max_tokens=8))
        judge(path, logits, [*prompt, *tokens[:-1]], engine.model.dtype, first=len(prompt) - 1)
    serve(engine, LONG[::-1])
    engine.submit(Request("a", LONG, max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.submit(Request("b", prompt, max_tokens=8))
    events = []
    while engine.has_work:
        events += engine.step()
    tokens = [event.token for event in events if event.request_id == "b"]
    assert {event.cached for event in events if event.request_id == "b"} == {shared}
    assert_greedy(path, prompt, tokens, engine.model.dtype)


@pytest.mark.parametrize("mode", MODES)
def test_four_streams_answer_greedily_as_hugging_face_does_wherever_rule_n_decides(path, mode):
    """Streams join and leave, long prompts come in chunks between their steps."""
    engine = engine_over(path, mode, slots=4, prefill_chunk=64)
    prompts = {str(i): some_ids(20 + 60 * i, seed=i) for i in range(7)}
    answers = engine.generate(Request(name, prompt, max_tokens=10 + 3 * int(name)) for name, prompt in prompts.items())
    for name, prompt in prompts.items():
        assert_greedy(path, prompt, answers[name], engine.model.dtype)


@pytest.mark.parametrize("mode", MODES)
def test_company_changes_no_token_that_rule_n_decides_and_none_alone(path, mode):
    """Greedy text may differ between batch sizes only at near ties, and not at all between two runs alone."""
    engine = engine_over(path, mode, slots=8)
    prompts = [some_ids(20 + i, seed=i) for i in range(8)]
    requests = [Request(str(i), prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    alone, again = (engine.generate(requests[:1])["0"] for _ in range(2))
    assert alone == again
    among = engine.generate(requests)["0"]
    first = next((i for i, (a, b) in enumerate(zip(alone, among, strict=True)) if a != b), None)
    if first is not None:
        forced = [*prompts[0], *alone[:first]]
        exact, rounded = (hugging_face(path, forced, dtype) for dtype in (torch.float32, torch.bfloat16))
        best = exact[-1].topk(2).values
        assert best[0] - best[1] <= 4 * (exact - rounded).abs().max()


def test_eight_equal_logits_are_drawn_evenly_by_steps_of_one_request_each(tmp_path):
    path = fixed(tmp_path / "m", dict.fromkeys(range(65, 73), 1.0), rest=-30.0)
    engine = engine_over(path, ("cpu", "unfused", "off"), slots=4, max_len=1024)
    drawn = engine.generate(
        Request(str(seed), (65,), SamplingParams(temperature=1.0, seed=seed % 3), max_tokens=1000) for seed in range(1, 5)
    )
    assert drawn["1"] == drawn["4"]  # the same seed
    assert drawn["1"] != drawn["2"]
    tokens = torch.tensor([drawn[name] for name in "123"]) - 65
    counts = torch.bincount(tokens.flatten(), minlength=8)
    assert len(counts) == 8
    assert ((counts - 375) ** 2 / 375).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001
    assert abs((tokens[:, 1:] == tokens[:, :-1]).float().mean() - 1 / 8) < 0.025
