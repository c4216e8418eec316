"""The full sampler's kernels against its torch twin: tokens, state and log-probabilities, over ties and all filters at once.

Runs on a GPU, with PDL where it has it, or in Triton's interpreter on the CPU (test_interpreter.py starts this file in a
process of its own).
"""

import os

import pytest
import torch

from runtime.ops import HAS_BIAS, WANTS_LOGPROBS, Rows, SlotState
from runtime.ops.full_sampler import FullScratch, sample_full
from runtime.ops.sampler import SamplerScratch, sample_rows
from runtime.ops.threshold import passes
from runtime.sampling import NOT_FINITE, TOLD_WORDS, draw_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PDL = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device, or TRITON_INTERPRET=1 (test_interpreter.py)"
)
SLOTS = 8
DRAWS = 1 if INTERPRETED else 100


def state_of(vocab, generator, **words):
    """Eight slots whose parameters are mixed at random, with `words` given by slot in place of some."""
    state = SlotState.allocate(SLOTS, torch.device("cpu"), vocab)

    def one_of(*values):
        return torch.tensor(values)[torch.randint(len(values), (SLOTS,), generator=generator)]

    mixed = dict(
        position=torch.arange(SLOTS) + 10,
        limit=torch.full((SLOTS,), 10_000),
        min_position=one_of(0, 11, 12),
        choice=torch.arange(SLOTS),
        temperature=one_of(0.0, 0.7, 1.0, 1.0, 3.0),
        top_k=one_of(0, 0, 1, 3, 50, vocab),
        top_p=one_of(1.0, 1.0, 0.0, 0.5, 0.9, 0.999),
        min_p=one_of(0.0, 0.0, 0.05, 1.0),
        repetition=one_of(1.0, 1.3, 0.5),
        presence=one_of(0.0, 1.5, -0.5),
        frequency=one_of(0.0, 0.4, -0.3),
        flags=one_of(0, HAS_BIAS, WANTS_LOGPROBS, HAS_BIAS | WANTS_LOGPROBS),
    )
    for name, values in {**mixed, **words}.items():
        getattr(state, name).copy_(torch.as_tensor(values))
    state.end_ids.fill_(-1)
    state.end_ids[:, 0] = torch.arange(SLOTS) * 3 % vocab
    state.seed.copy_(torch.randint(-(2**31), 2**31 - 1, (SLOTS, 2), generator=generator))
    state.seen.copy_(
        torch.randint(8, (SLOTS, vocab), generator=generator) * (torch.rand(SLOTS, vocab, generator=generator) < 0.2)
    )
    state.bias.copy_(3 * torch.randn(SLOTS, vocab, generator=generator))
    return moved(state, vocab)


def moved(state, vocab):
    copy = SlotState.allocate(SLOTS, DEVICE, vocab)
    for name in ("packed", "seen", "bias"):
        getattr(copy, name).copy_(getattr(state, name))
    return copy


def play(logits, state, slots, draws=DRAWS):
    """Draw again and again by kernel and twin, from the same state; what the kernel told of the last draw."""
    slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    live, logits, vocab = slots >= 0, logits.to(DEVICE), logits.shape[1]
    at, scratch = slots.clamp(min=0).long(), FullScratch.make(len(slots), logits.shape[1], DEVICE)
    twin = moved(state, vocab)
    for _ in range(draws):
        rows = Rows(slots, torch.where(live, state.position[at], 0))
        told = torch.full((len(slots), TOLD_WORDS), 99, dtype=torch.int32, device=DEVICE)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        sample_full(logits, rows, state, scratch, told, INTERPRETED)
        wanted = draw_torch(logits, rows, twin, "full")
        assert told[live, 0].tolist() == wanted[live, 0].tolist()
        assert state.packed.equal(twin.packed)
        assert state.seen.equal(twin.seen)
        for row in torch.nonzero(live & (wanted[:, 0] >= 0)).flatten().tolist():
            ours, theirs = told[row].cpu(), wanted[row].cpu()
            assert ours[1:2].view(torch.float32).item() == pytest.approx(theirs[1:2].view(torch.float32).item(), abs=1e-4)
            if state.flags[at[row]] & WANTS_LOGPROBS:
                assert ours[2:22].equal(theirs[2:22])
                listed = ours[2:22] >= 0
                values = [words[22:][listed].view(torch.float32) for words in (ours, theirs)]
                assert torch.allclose(*values, atol=1e-4)
            else:
                assert (ours[2:] == -1).all()
    return told


VOCABS = (7, 1100, 32_000, 128_256, 152_064)
MIXES = [(7, 0), (1100, 1)] if INTERPRETED else [(vocab, seed) for vocab in VOCABS for seed in range(12)]


@pytest.mark.parametrize(("vocab", "seed"), MIXES)
def test_every_mix_of_options_draws_and_tells_as_the_twin(vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = [[3, -1, 0], [4, 6]][seed % 2] if INTERPRETED else [3, -1, 0, 5, 1, 2, 4, 6, 7]
    logits = 3 * torch.randn(len(slots), vocab, generator=generator)
    play(logits, state_of(vocab, generator), slots, draws=max(DRAWS, 2 - seed))


@pytest.mark.parametrize("scale", [1e-30] if INTERPRETED else [0.0, 1e-30, 1.0, 1e30])
def test_ties_denormals_and_huge_logits_are_told_apart_by_value_and_then_by_id(scale):
    """Nine in ten ids are tied; the filters' borders fall among them."""
    generator = torch.Generator().manual_seed(1)
    vocab = 1500
    words = dict(top_k=[0, 5, 700, 0, 3, 0, 40, 0], top_p=[0.3, 1.0, 0.5, 0.9, 1.0, 0.6, 0.5, 1.0], temperature=[1.0] * SLOTS)
    plain = dict(repetition=[1.0] * 8, presence=[0.0] * 8, frequency=[0.0] * 8, flags=[2] * 8, min_p=[0.0] * 8)
    state = state_of(vocab, generator, **words, **plain)
    logits = scale * torch.randn(SLOTS, vocab, generator=generator)
    logits[torch.rand(SLOTS, vocab, generator=generator) < 0.9] = scale
    logits[:, ::7] *= -1  # -0 is 0
    slots = [0, 2] if INTERPRETED else list(range(SLOTS))
    play(logits[: len(slots)], state, slots, draws=1 if INTERPRETED else 50)


def test_what_is_not_finite_and_what_is_banned():
    generator = torch.Generator().manual_seed(2)
    vocab = 1100
    state = state_of(
        vocab, generator, flags=[2] * SLOTS, top_p=[0.9] * SLOTS, temperature=[1.0, 1.0, 1.0, 1.0, 0.0] + 3 * [1.0]
    )
    logits = torch.randn(5, vocab, generator=generator)
    logits[0, 1050] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5:] = -torch.inf
    logits[4, :1099] = -torch.inf
    tokens = play(logits, state, list(range(5)), draws=1)[:, 0].tolist()
    assert tokens[:3] == [NOT_FINITE] * 3
    assert tokens[3] < 5
    assert tokens[4] == 1099


@pytest.mark.parametrize("vocab", [1100] if INTERPRETED else [1100, 128_256])
def test_rows_that_ask_for_nothing_draw_what_the_plain_kernel_draws(vocab):
    generator = torch.Generator().manual_seed(3)
    zeros, ones = [0.0] * SLOTS, [1.0] * SLOTS
    nothing = dict(top_k=[0] * SLOTS, top_p=ones, min_p=zeros, repetition=ones, presence=zeros, frequency=zeros)
    state = state_of(vocab, generator, **nothing, flags=[0, 2] * 4)
    plain, slots = moved(state, vocab), torch.arange(2, dtype=torch.int32, device=DEVICE)
    logits = torch.randn(2, vocab, generator=generator).to(DEVICE)
    scratch = SamplerScratch.make(2, vocab, DEVICE)
    for _ in range(DRAWS):
        rows = Rows(slots, plain.position[:2].clone())
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        told = play(logits, state, slots.tolist(), draws=1)
        assert told[:, 0].equal(sample_rows(logits, rows, plain, scratch, torch.empty_like(slots), PDL, INTERPRETED))
        assert plain.packed.equal(state.packed)


def test_any_threshold_is_found_in_the_passes_there_are():
    assert [passes(vocab) for vocab in (2, 32_000, 128_256, 152_064)] == [10, 14, 14, 16]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_replays_of_a_graph_draw_bit_for_bit_what_launches_draw(batch):
    vocab, generator = 128_256, torch.Generator().manual_seed(4)
    eager = state_of(vocab, generator)
    captured, logits = moved(eager, vocab), (3 * torch.randn(batch, vocab, generator=generator)).to(DEVICE)
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    scratch, told = FullScratch.make(SLOTS, vocab, DEVICE), torch.zeros((batch, TOLD_WORDS), dtype=torch.int32, device=DEVICE)
    positions, start = eager.position[:batch].clone(), moved(eager, vocab)
    sample_full(logits, Rows(slots, positions), captured, scratch, told)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_full(logits, Rows(slots, positions), captured, scratch, told)
    for name in ("packed", "seen"):
        getattr(captured, name).copy_(getattr(start, name))
    for _ in range(50):
        torch.cuda.synchronize()
        graph.replay()
        replayed = told.clone()
        torch.cuda.synchronize()
        assert sample_full(logits, Rows(slots, positions), eager, scratch, told).equal(replayed)
        assert captured.packed.equal(eager.packed)
        assert captured.seen.equal(eager.seen)
        positions += 1
