"""A decoder small enough to read: the next token is a fixed function of the last one, whatever the cache holds."""

import torch

from runtime.ops import Linear

VOCAB = 32


class FakeModel:
    """logits put `next_token(id)` on top; the K of a position holds its token id, so tests can read the cache like a tape."""

    vocab_size = VOCAB
    num_layers, num_kv_heads, head_dim, qk_norm = 1, 1, 2, False
    device, dtype, weight_format = torch.device("cpu"), torch.float32, "bf16"

    def __init__(self, next_token=lambda i: (i + 1) % VOCAB):
        self.next_token = next_token
        self.batches = []  # rows of each decode step

    def prefill(self, ids, start, slot, cache):
        cache.k[0, slot, 0, start : start + len(ids), 0] = ids.float()
        return ids[:, None].float()

    def logits(self, hidden):
        rows = torch.zeros(len(hidden), VOCAB)
        for row, last in enumerate(hidden[:, 0].int().tolist()):
            top = self.next_token(last)
            rows[row, top % VOCAB] = 10.0 if top >= 0 else float("nan")
        return rows

    def decode(self, slot_of_row, state, cache, ops):
        ids, rows = ops.embed(slot_of_row, state, torch.arange(VOCAB)[:, None], torch.ones(1), Linear(torch.ones(1, 1)))
        self.batches.append(rows.slots.tolist())
        for token, slot, position in zip(ids[:, 0].tolist(), rows.slots.tolist(), rows.positions.tolist(), strict=True):
            if slot >= 0:
                cache.k[0, slot, 0, position, 0] = token
        return rows, self.logits(ids.float())
