"""Penalties, bias, log-probabilities and filters through the engine, over checkpoints whose logits are known."""

import math
from dataclasses import replace

import pytest
import torch

from models import find_model, load_model
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.request import Request, SamplingParams
from tests.checkpoints import fixed, tiny

FOUR = {65: 3.0, 66: 2.0, 67: 1.0, 68: 0.0}
FOUR_LOGPROBS = [-0.440190, -1.440190, -2.440190, -3.440190]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture(scope="module")
def make(device, tmp_path_factory):
    """An engine over logits that are what `values` says whatever the input; on a GPU it replays graphs."""

    def build(values, rest=-30.0, slots=8, path=None, max_len=512, **options):
        path = path or fixed(tmp_path_factory.mktemp("fixed"), values, rest)
        decoder = load_model(find_model(str(path)), torch.device(device), torch.bfloat16, max_len)
        pdl = "on" if device == "cuda" and torch.cuda.get_device_capability() >= (9, 0) else "off"
        ways = ("fused", "on", pdl) if device == "cuda" else ("unfused", "off", "off")
        engine = Engine(decoder, EngineConfig(device, "bfloat16", *ways, max_len=max_len, max_slots=slots, **options))
        engine.prepare()
        return engine

    return build


def run(engine, *requests):
    """Every event, by request."""
    events = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


def tokens(engine, prompt, n, request_id="a", **params):
    return [e.token for e in run(engine, Request(request_id, prompt, SamplingParams(**params), n))[request_id]]


def shares(engine, n=1600, **params):
    """How often each id is drawn in n draws by 16 requests, each with a seed of its own."""
    parts = [Request(str(i), (65,), SamplingParams(temperature=1.0, seed=i, **params), n // 16) for i in range(16)]
    drawn = [token for answer in engine.generate(parts).values() for token in answer]
    assert len(drawn) == n
    return {token: drawn.count(token) / n for token in set(drawn)}


def near(drawn, wanted, n=1600):
    assert drawn.keys() == wanted.keys()
    for token, share in wanted.items():
        assert abs(drawn[token] - share) < 4 * math.sqrt(share * (1 - share) / n) + 1e-9


PENALTIES = [
    ({"presence_penalty": 2.0}, [65, 66, 65, 65, 65, 65, 65]),
    ({"frequency_penalty": 0.6}, [65, 65, 66, 65, 66, 65, 66]),
    ({"repetition_penalty": 1.5}, [66, 65, 65, 65, 65, 65, 65]),
]


def test_penalties_fall_on_the_right_tokens_and_on_no_other_request(make):
    """Presence and frequency punished the prompt, or repetition ignored it."""
    engine = make({65: 5.0, 66: 4.0}, rest=-10.0)
    for params, wanted in PENALTIES:
        assert tokens(engine, (65,) * 10, 7, **params) == wanted
    together = [Request(str(i), (65,) * 10, SamplingParams(**params), 7) for i, (params, _) in enumerate(PENALTIES)]
    answers = engine.generate([*together, Request("none", (65,) * 10, max_tokens=7)])
    assert [answers[str(i)] for i in range(3)] == [wanted for _, wanted in PENALTIES]
    assert answers["none"] == [65] * 7


def test_a_repetition_penalty_multiplies_negative_logits(make):
    """Dividing a negative logit by the penalty raises it."""
    engine = make({65: -1.0, 66: -1.1875})
    assert tokens(engine, (65,) * 10, 7, repetition_penalty=1.5) == [66, 65, 65, 65, 65, 65, 65]


def test_a_slot_forgets_counts_and_bias_of_its_last_owner(make):
    engine = make({65: 5.0, 66: 4.0}, rest=-10.0, slots=1)
    bias = ((70, 100.0),)
    assert tokens(engine, (66,) * 3, 4, presence_penalty=2.0, logit_bias=bias) == [70] * 4
    assert tokens(engine, (65,) * 10, 7, presence_penalty=2.0) == PENALTIES[0][1]
    assert tokens(engine, (65,), 2) == [65, 65]
    assert tokens(engine, (65,), 1, logit_bias=((66, 1.5),)) == [66]


def test_the_prompts_ids_count_for_repetition_across_chunks(make):
    engine = make({65: 5.0, 66: 4.0, 67: 3.75}, rest=-10.0, prefill_chunk=4)
    assert tokens(engine, (65, *(70,) * 8, 66), 1, repetition_penalty=2.0) == [67]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.5}, {"presence_penalty": 1.0}]
)
def test_logprobs_are_the_models_own_whatever_the_draw_does(make, params):
    """They followed temperature or top_p in one path only, or the drawn token's own was left out."""
    engine = make(FOUR)
    events = run(engine, Request("a", (65,), SamplingParams(**params, logprobs=4), 8))["a"]
    tolerance = 1e-5 if engine.config.device == "cpu" else 4e-3  # fused logits are 15.98 / 16 of FOUR: no rounded norm
    assert len(events) == 8
    for event in events:
        assert [token for token, _ in event.logprobs.top] == [65, 66, 67, 68]
        assert [value for _, value in event.logprobs.top] == pytest.approx(FOUR_LOGPROBS, abs=tolerance)
        assert event.logprobs.logprob == pytest.approx(dict(event.logprobs.top)[event.token], abs=1e-6)


def test_a_tokens_own_logprob_is_told_outside_the_best(make):
    engine = make(FOUR)
    (event,) = run(engine, Request("a", (65,), SamplingParams(logit_bias=((68, 50.0),), logprobs=1), 1))["a"]
    assert event.token == 68
    assert event.logprobs.logprob == pytest.approx(FOUR_LOGPROBS[3], abs=1e-5)
    assert [token for token, _ in event.logprobs.top] == [65]
    (event,) = run(engine, Request("a", (65,), SamplingParams(logprobs=0), 1))["a"]
    assert event.logprobs.top == ()
    (event,) = run(engine, Request("a", (65,), SamplingParams(), 1))["a"]
    assert event.logprobs is None


def test_a_request_that_asks_for_logprobs_draws_what_it_draws_without(make, tmp_path):
    engine = make(None, path=tiny(tmp_path))
    for params in ({}, {"temperature": 1.0, "seed": 5}):
        assert tokens(engine, (1, 2, 3), 40, **params) == tokens(engine, (1, 2, 3), 40, logprobs=20, **params)


@pytest.mark.parametrize("chunk", [512, 3])
def test_prompt_logprobs_are_the_teacher_forced_ones(make, tmp_path, chunk):
    engine = make(None, path=tiny(tmp_path), prefill_chunk=chunk)
    prompt = tuple(torch.randint(512, (70,), generator=torch.Generator().manual_seed(0)).tolist())
    (event,) = run(engine, Request("a", prompt, SamplingParams(logprobs=2), 1, prompt_logprobs=2))["a"]
    assert event.prompt_logprobs[0] is None
    assert len(event.prompt_logprobs) == len(prompt)
    ids = torch.tensor(prompt, device=engine.model.device)
    logits = engine.model.logits(engine.model.prefill(ids, 0, 0, engine.cache))
    wanted = torch.log_softmax(logits, -1).cpu()
    for i, told in enumerate(event.prompt_logprobs[1:]):
        assert told.logprob == pytest.approx(wanted[i, prompt[i + 1]].item(), abs=0.1)
        assert [value for _, value in told.top] == pytest.approx(wanted[i].topk(2).values.tolist(), abs=0.1)
    assert event.logprobs.logprob == pytest.approx(wanted[-1, event.token].item(), abs=0.1)


def test_prompt_logprobs_come_once_and_a_prompt_of_one_token_has_none(make):
    first, second = run(make(FOUR), Request("a", (65,), max_tokens=2, prompt_logprobs=1))["a"]
    assert first.prompt_logprobs == (None,)
    assert second.prompt_logprobs is None
    first, second = run(make(FOUR), Request("a", (65, 66, 300), max_tokens=2, prompt_logprobs=1))["a"]
    assert [told.logprob for told in first.prompt_logprobs[1:]] == pytest.approx([FOUR_LOGPROBS[1], -33.44019], abs=1e-4)
    assert first.prompt_logprobs[1].top == ((65, pytest.approx(FOUR_LOGPROBS[0], abs=1e-5)),)


QUARTERS = {token: math.log(p) for token, p in {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}.items()}


@pytest.fixture(scope="module")
def quarters(make):
    return make(QUARTERS, slots=16)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_p": 0.3}, 1),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.85}, 3),
        ({"top_p": 0.96}, 4),
        ({"top_p": 0.0}, 1),
        ({"top_k": 1}, 1),
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 4),
        ({"top_k": 320}, 4),
        ({"top_k": 100_000}, 4),
        ({"top_k": -1, "logprobs": 0}, 4),
        ({"top_k": 2, "top_p": 0.6}, 1),
        ({"min_p": 0.5}, 2),
    ],
)
def test_filters_keep_the_crossing_token_and_every_border_of_top_k_is_served(quarters, params, kept):
    """A nucleus without its crossing token is too narrow; top_k 0 or above the vocabulary means off."""
    weights = {token: math.exp(torch.tensor(v / 16).bfloat16().item() * 16) for token, v in QUARTERS.items()}
    kept_weights = dict(list(weights.items())[:kept])
    total = sum(kept_weights.values())
    near(shares(quarters, **params), {token: weight / total for token, weight in kept_weights.items()})


TEMPERATURES = [0.0, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1.0, 2.0]


@pytest.fixture(scope="module")
def near_zero(make):
    """400 tokens at each temperature, as rows of one batch: without a nucleus, then with one."""
    engine = make({65: 11.0, 66: 10.0}, rest=-20.0, slots=len(TEMPERATURES))
    params = [[SamplingParams(temperature=each, top_p=top_p) for each in TEMPERATURES] for top_p in (1.0, 0.9)]
    return [engine.generate([Request(str(each.temperature), (65,), each, 400) for each in batch]) for batch in params]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_tiny_temperatures_are_greedy_with_and_without_a_nucleus(near_zero, temperature):
    """Between zero and about 1e-4 the division overflowed into junk."""
    for batch in near_zero:
        drawn = batch[str(temperature)]
        assert len(drawn) == 400
        if temperature <= 1e-3:
            assert set(drawn) == {65}
        else:
            share = 1 / (1 + math.exp(-1 / temperature))
            near({t: drawn.count(t) / 400 for t in set(drawn)}, {65: share, 66: 1 - share}, 400)


def test_logits_that_are_not_finite_end_their_request_alone(make, tmp_path):
    """They gave a row of token 0, or poisoned the batch."""
    for token, value in ((7, math.nan), (70, math.inf)):
        engine = make({token: value}, rest=0.0)
        asked = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logit_bias=((70, -100.0),), logprobs=2)
        (event,) = run(engine, Request("a", (65,), asked, 4))["a"]
        assert (event.token, event.finish) == (None, "error")
        (event,) = run(engine, Request("a", (65, 66), max_tokens=4, prompt_logprobs=0))["a"]
        assert (event.token, event.finish) == (None, "error")


def test_a_bias_on_every_likely_id_leaves_a_valid_one(make):
    engine = make({65: 5.0, 66: 4.0}, rest=0.0, slots=16)
    bias = tuple((token, -100.0) for token in range(320))
    assert tokens(engine, (65,), 3, logit_bias=bias) == [65] * 3
    near(shares(engine, logit_bias=bias[:65] + bias[67:]), {65: 0.7311, 66: 0.2689})


def test_a_greedy_row_with_banned_ids_leaves_the_draws_of_others_as_they_are(make):
    engine = make({65: 5.0, 66: 4.0, 67: 3.0}, rest=-10.0)
    others = [Request(str(i), (65,), SamplingParams(temperature=1.0, seed=i), 300) for i in range(3)]
    alone = engine.generate(others)
    banned = SamplingParams(logit_bias=((65, -100.0), (66, -100.0)))
    mixed = engine.generate([Request("banned", (65,), banned, 300), *others])
    assert mixed.pop("banned") == [67] * 300
    assert mixed == alone


def test_a_bias_moves_the_probabilities_by_its_exponential(make):
    drawn = shares(make({65: 2.0, 66: 1.0}, slots=16), logit_bias=((66, 1.0),))
    near(drawn, {65: 0.5, 66: 0.5})


def test_min_tokens_holds_against_a_bias_on_the_end_id(make):
    engine = make({65: 5.0}, rest=-10.0)
    params = SamplingParams(logit_bias=((256, 100.0),))
    assert engine.generate([Request("a", (65,), params, 9, min_tokens=3, end_ids=(256,))])["a"] == [65, 65, 65, 256]


@pytest.mark.parametrize("token", [-1, 320])
def test_a_bias_outside_the_vocabulary_is_refused_by_name(make, token):
    with pytest.raises(RequestError, match=f"token id {token} is outside the vocabulary of 0 to 319") as caught:
        make(FOUR).check(Request("a", (65,), SamplingParams(logit_bias=((token, 1.0),))))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}], ids=["plain", "full"])
def test_ties_go_to_the_lowest_id_and_near_values_are_told_apart(make, extra):
    """Argmax after a rounding softmax, or ties broken at random, changed greedy answers between runs and batches."""
    for values, rest, wanted in (({65: 5.0, 66: 5.0}, 0.0, 65), ({65: 20.0, 66: 20.125}, 0.0, 66)):
        engine = make(values, rest, slots=8)
        for batch in (1, 2, 5, 8):
            asked = [Request(str(i), (65,), SamplingParams(**extra), 25) for i in range(batch)]
            assert all(answer == [wanted] * 25 for answer in engine.generate(asked).values())


def test_the_same_prompt_twice_alone_is_the_same_answer(make, tmp_path):
    engine = make(None, path=tiny(tmp_path))
    for params in ({}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "presence_penalty": 0.5, "logprobs": 3}):
        request = Request("a", (5, 6, 7), SamplingParams(**params), 60)
        first, again = ([replace(event, cached=0) for event in run(engine, request)["a"]] for _ in range(2))
        assert first == again


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}], ids=["plain", "full"])
def test_a_step_draws_new_numbers_each_time_and_a_seed_the_same_ones(make, extra):
    """A generator frozen at capture drew the same number at each replay, or ignored a new seed."""
    engine = make(dict.fromkeys(range(65, 73), 1.0))
    asked = [Request(str(i), (65,), SamplingParams(temperature=1.0, seed=i, **extra), 500) for i in range(8)]
    drawn = torch.tensor(list(engine.generate(asked).values())) - 65
    counts = torch.bincount(drawn.flatten(), minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001
    assert abs((drawn[:, 1:] == drawn[:, :-1]).float().mean() - 1 / 8) < 0.025
    assert not drawn[1].equal(drawn[2])
    for graph in (engine.modes.graph, False):
        engine.modes.switch(graph=graph)
        again = tokens(engine, (65,), 100, temperature=1.0, seed=1, **extra)
        assert again == (drawn[1, :100] + 65).tolist()
