"""Teacher forcing on a model whose logits tell which ids it was fed."""

import pytest
import torch

from bench.check import forced_logits
from runtime.decode_step import DecodeStep
from runtime.kv_cache import KVCache
from runtime.ops import SlotState, load_ops
from runtime.sampling import Sampler
from tests.runtime.fake import VOCAB, FakeModel

IDS = [5, 9, 2, 31, 0, 7, 7, 1, 30, 4]


def play(prefill, chunk=3, rows=1, model=None):
    model = model or FakeModel()
    cache = KVCache.allocate(1, rows, 1, len(IDS), 2, torch.float32, model.device)
    state = SlotState.allocate(rows, model.device)
    step = DecodeStep(model, load_ops("unfused"), Sampler(), cache, state)
    return forced_logits(step, False, IDS, prefill, chunk, rows), cache, model


@pytest.mark.parametrize("prefill", [0, 1, 3, 7, len(IDS)])
def test_every_position_is_fed_from_the_list_and_not_from_the_sampler(prefill):
    (logits,), cache, model = play(prefill)
    assert logits.shape == (len(IDS), VOCAB)
    assert logits.argmax(dim=1).tolist() == [(i + 1) % VOCAB for i in IDS]
    assert cache.k[0, 0, 0, :, 0].tolist() == IDS
    assert len(model.batches) == len(IDS) - prefill


def test_prefill_goes_in_chunks():
    model, chunks = FakeModel(), []
    inner = model.prefill
    model.prefill = lambda ids, start, *rest: chunks.append((start, ids.tolist())) or inner(ids, start, *rest)
    play(7, chunk=3, model=model)
    assert chunks == [(0, IDS[:3]), (3, IDS[3:6]), (6, IDS[6:7])]


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_the_ids_play_in_the_first_row_and_the_last_among_fillers_elsewhere(rows):
    (first, last), cache, model = play(4, rows=rows)
    assert torch.equal(first, last)
    assert cache.k[0, rows - 1, 0, :, 0].tolist() == IDS
    assert model.batches == [list(range(rows))] * (len(IDS) - 4)


def test_fillers_stand_at_positions_of_their_own():
    model, positions = FakeModel(), []
    inner = model.decode
    model.decode = lambda slots, state, *rest: positions.append(state.position[slots].tolist()) or inner(slots, state, *rest)
    play(4, rows=4, model=model)
    assert positions[0] == [4, 1, 8, 4]
    assert all(0 <= position < len(IDS) for step in positions for position in step)
