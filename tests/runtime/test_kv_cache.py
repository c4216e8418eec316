"""The cache's tensors: copies between slots, and offsets past 2^31 elements."""

import pytest
import torch

from models import Decoder, ModelConfig
from models.layout import allocate, pieces
from models.random_weights import fill_randomly
from runtime.kv_cache import KVCache
from runtime.ops import SlotState, load_ops
from tests.runtime.engines import some_ids


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copied_prefix_is_all_that_changes_in_its_slot(device):
    cache = KVCache.allocate(2, 3, 2, 10, 4, torch.bfloat16, torch.device(device))
    cache.k.normal_(), cache.v.normal_()
    k, v = cache.k.clone(), cache.v.clone()
    cache.copy_prefix(2, 0, 7)
    for old, new in ((k, cache.k), (v, cache.v)):
        old[:, 0, :, :7] = old[:, 2, :, :7]
        assert new.equal(old)


@pytest.mark.gpu
@torch.inference_mode()
def test_the_highest_slot_of_a_cache_past_31_bits_computes_what_the_lowest_does():
    """Index times stride wrapped at 2^31 elements: silent rubbish with big caches."""
    slots, capacity, device = 17, 131072, torch.device("cuda")
    config = ModelConfig("llama", 512, 256, 344, 1, 8, 8, 128, capacity, 1e-5)
    table = pieces(config)
    weights = allocate(table, device, torch.bfloat16)
    fill_randomly(weights, table, lambda done: None)
    decoder = Decoder(config, weights, capacity)
    cache = KVCache.allocate(1, slots, 8, capacity, 128, torch.bfloat16, device)
    assert cache.k[0, -1].data_ptr() - cache.k.data_ptr() >= cache.k.itemsize * 2**31
    state = SlotState.allocate(slots, device)
    ids, last = torch.tensor(some_ids(40, seed=1), device=device), slots - 1

    def played(ops, slot, position, rows):
        state.position[slot], state.token[slot] = position, 7
        row = torch.full((rows,), -1, dtype=torch.int32, device=device)
        row[rows - 1] = slot
        return decoder.decode(row, state, cache, ops)[1][-1].clone()

    hopper = torch.cuda.get_device_capability() >= (9, 0)
    for ops in (load_ops("unfused"), load_ops("fused", pdl=hopper)):
        for slot in (0, last):
            decoder.prefill(ids, 0, slot, cache)
        for rows in (1, 2, 16):
            for position in (40, 41, 42):
                low, high = (played(ops, slot, position, rows) for slot in (0, last))
                assert low.isfinite().all()
                assert high.equal(low)
        for position in (60_000, capacity - 2):
            for tensor in (cache.k, cache.v):
                tensor[:, last, :, :position].normal_()
            cache.copy_prefix(last, 0, position)
            assert cache.k[:, 0, :, :position].equal(cache.k[:, last, :, :position])
            low, high = (played(ops, slot, position, 1) for slot in (0, last))
            assert low.isfinite().all()
            assert high.equal(low)
