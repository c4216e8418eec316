"""Owns the state each request has on the device, indexed by slot, and the step that reads and advances it.

Does not own who holds which slot (scheduler), the model's arithmetic (the Model) or the draw (sampling).
"""

import struct
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.kv_cache import KVCache
from runtime.ops import Ops, Rows
from runtime.request import MAX_END_IDS, Request
from runtime.sampling import Variant, sample

WIDTH = 32
"""int32 words of one slot's state; 28 are in use."""


class Model(Protocol):
    """What the engine asks of a decoder. Everything lies on one device, in one dtype."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    def prefill(self, ids: Tensor, start: int, slot: int, cache: KVCache) -> Tensor:
        """Run prompt tokens ids `[T]` int64 at positions start.. of a slot, write their K/V, return hidden states `[T, C]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: hidden `[N, C]` -> `[N, V]` float32."""

    def decode(self, ids: Tensor, rows: Rows, cache: KVCache, ops: Ops) -> Tensor:
        """One token a row: ids `[B]` int32 -> logits `[B, V]` float32."""


@dataclass(frozen=True)
class SlotState:
    """Device state by slot. One packed int32 tensor `[slots, 32]`, so that a request arrives in one copy; the rest are views.

    Attributes:
        token: last token known, `[slots]`; position: the index it will be written at.
        limit: the index at which a drawn token is the last; min_position: the first index at which an end id may stand.
        done: not zero once an end id or the limit was drawn; the slot's rows are idle from then on.
        end_ids: `[slots, 16]`, -1 where unused.
        seed `[slots, 2]`, choice, top_k int32; temperature, top_p, min_p float32.
    """

    packed: Tensor
    token: Tensor
    position: Tensor
    limit: Tensor
    min_position: Tensor
    done: Tensor
    seed: Tensor
    choice: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    end_ids: Tensor

    @classmethod
    def allocate(cls, slots: int, device: torch.device) -> "SlotState":
        packed = torch.zeros((slots, WIDTH), dtype=torch.int32, device=device)
        words, floats = packed.unbind(1), packed.view(torch.float32).unbind(1)
        return cls(
            packed,
            token=words[0],
            position=words[1],
            limit=words[2],
            min_position=words[3],
            done=words[4],
            seed=packed[:, 5:7],
            choice=words[7],
            top_k=words[8],
            temperature=floats[9],
            top_p=floats[10],
            min_p=floats[11],
            end_ids=packed[:, 12 : 12 + MAX_END_IDS],
        )


def pack(request: Request, limit: int) -> list[int]:
    """One slot's words for `request` as it stands before its first token; the order is SlotState's."""
    p = request.params
    length = len(request.prompt_ids)
    seed = p.seed & (2**64 - 1)
    ends = list(request.end_ids) + [-1] * (MAX_END_IDS - len(request.end_ids))
    data = struct.pack(
        "<5i2I2i3f",
        *(0, length, limit, length + request.min_tokens, 0),
        *(seed & 0xFFFFFFFF, seed >> 32),
        *(p.choice, max(p.top_k, 0)),
        *(p.temperature, p.top_p, p.min_p),
    )
    words = list(struct.unpack(f"<{len(data) // 4}i", data)) + ends
    return words + [0] * (WIDTH - len(words))


def draw(logits: Tensor, slots: Tensor, state: SlotState, index: Tensor, variant: Variant) -> Tensor:
    """Draw one token a row, at `index [B]`, by its slot's parameters, and advance the slot's state.

    Args:
        logits: `[B, V]` float32.
        slots: `[B]` int32, -1 for an idle row, whose state stays as it is.
        index: `[B]` int32, the index the drawn token takes.

    Returns:
        Tokens `[B]` int32, sampling.NOT_FINITE for a row whose logits are not finite (its slot is done).
    """
    at = slots.clamp(min=0).long()
    ends = state.end_ids[at]  # [B, 16]
    early = (index < state.min_position[at])[:, None] & (ends >= 0)
    logits = logits.scatter_add(1, ends.clamp(min=0).long(), torch.where(early, -torch.inf, 0.0))
    tokens = sample(
        logits,
        variant,
        temperature=state.temperature[at],
        top_k=state.top_k[at],
        top_p=state.top_p[at],
        min_p=state.min_p[at],
        seed=state.seed[at],
        choice=state.choice[at],
        position=index,
    )
    live = slots >= 0
    done = (tokens[:, None] == ends).any(dim=1) | (index >= state.limit[at]) | (tokens < 0)
    # Idle rows are aimed at slot 0 and must not touch it: their words are added as zero, the live ones as a difference.
    for words, new in ((state.token, tokens), (state.position, index), (state.done, done.int())):
        words.index_add_(0, at, torch.where(live, new - words[at], 0))
    return tokens


def decode_step(model: Model, ops: Ops, cache: KVCache, state: SlotState, slot_of_row: Tensor, variant: Variant) -> Tensor:
    """One decode step for rows `slot_of_row [B]` int32 (-1: idle): read state, run the model, draw, advance.

    Returns:
        Tokens `[B]` int32. Rows of idle or done slots carry no meaning; they read and write no cache and no state.
    """
    slots, index, logits = step_logits(model, ops, cache, state, slot_of_row)
    return draw(logits, slots, state, index, variant)


def step_logits(model: Model, ops: Ops, cache: KVCache, state: SlotState, slot_of_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The step without its draw: live slots `[B]`, the index of the token to be drawn `[B]`, logits `[B, V]`."""
    at = slot_of_row.clamp(min=0).long()
    idle = (slot_of_row < 0) | (state.done[at] != 0)
    slots = torch.where(idle, -1, slot_of_row)
    positions = torch.where(idle, 0, state.position[at])
    ids = torch.where(idle, 0, state.token[at])
    logits = model.decode(ids, Rows(slots, positions), cache, ops)
    return slots, positions + 1, logits
