"""The engine over real (tiny) decoders: what a slot held before must not matter, and draws must follow the logits."""

import pytest
import torch

from models import find_model, load_model
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.request import Request, SamplingParams
from tests.checkpoints import fixed, tiny
from tests.rule_n import hugging_face


def load(path, slots=1, max_len=512, **options):
    decoder = load_model(find_model(str(path)), torch.device("cpu"), torch.bfloat16, max_len, progress=False)
    return Engine(
        decoder, EngineConfig("cpu", "bfloat16", "unfused", "off", "off", max_len=max_len, max_slots=slots, **options)
    )


def record(engine, request_id):
    """Run what is queued to its end; the logits that each token of `request_id` was drawn from."""
    logits, draw = [], engine._sampler.draw

    def recording(rows_logits, rows, *rest):
        running = [r.request.id for r in engine._scheduler._running]
        if running == [request_id]:
            logits.append(rows_logits.clone())
        return draw(rows_logits, rows, *rest)

    engine._sampler.draw = recording
    while engine.has_work:
        engine.step()
    engine._sampler.draw = draw
    return torch.cat(logits)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny"))


def ids(count, seed):
    return tuple(torch.randint(512, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("prefix", [0, 3, 5])
@pytest.mark.parametrize("aborted", [False, True])
def test_a_short_request_after_a_long_one_has_the_logits_it_has_alone(path, prefix, aborted):
    """A short prompt in a slot that a longer one had used saw its old keys, and could answer the earlier user's text."""
    short = ids(5, seed=2)
    engine = load(path)
    engine.submit(Request("b", short, max_tokens=8))
    alone = record(engine, "b")
    engine = load(path, prefill_chunk=128)
    engine.submit(Request("a", short[:prefix] + ids(300, seed=1), max_tokens=20))
    for _ in range(2 if aborted else 0):
        engine.step()
    if aborted:
        engine.cancel("a")
    while engine.has_work:
        engine.step()
    engine.submit(Request("b", short, max_tokens=8))
    assert torch.equal(record(engine, "b"), alone)


def test_company_changes_no_token_that_rule_n_decides_and_none_alone(path):
    """Greedy text may differ between batch sizes only at near ties, and not at all between two runs alone."""
    prompts = [ids(20 + i, seed=i) for i in range(8)]
    requests = [Request(str(i), prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    alone, again = (load(path, slots=8).generate(requests[:1])["0"] for _ in range(2))
    assert alone == again
    among = load(path, slots=8).generate(requests)["0"]
    first = next((i for i, (a, b) in enumerate(zip(alone, among, strict=True)) if a != b), None)
    if first is not None:
        forced = [*prompts[0], *alone[:first]]
        exact, rounded = (hugging_face(path, forced, dtype) for dtype in (torch.float32, torch.bfloat16))
        best = exact[-1].topk(2).values
        assert best[0] - best[1] <= 4 * (exact - rounded).abs().max()


def test_eight_equal_logits_are_drawn_evenly_by_steps_of_one_request_each(tmp_path):
    engine = load(fixed(tmp_path / "m", dict.fromkeys(range(65, 73), 1.0), rest=-30.0), slots=4, max_len=1024)
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
