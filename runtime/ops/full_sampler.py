"""Owns the full sampler: penalties, bias, top_k, top_p, min_p and log-probabilities, in small launches and without a sort.

Does not own the plain draw, whose noise and end it shares (sampler), or the state's layout (it is handed tensors).

What the filters keep, and the 20 best, are found as thresholds (threshold).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops import Rows, SlotState
from runtime.ops._gemv import dot_dtype, launch_options
from runtime.ops._triton import tl, triton
from runtime.ops.sampler import BLOCK, GREEDY_BELOW, block_winner, log, settle
from runtime.ops.threshold import (
    BEST,
    BINS,
    CHUNK,
    KEPT,
    PART_BITS,
    PARTIALS,
    RAW_BEST,
    RAW_LEAST,
    RAW_SUM,
    WORDS,
    id_bits,
    key_of,
    narrow_kernel,
    narrowed,
    passes,
    rank_key,
    scaled_by,
)  # fmt: skip

TOP = 20
LISTED = 32
"""Places for the ids of the best: TOP, padded."""


@triton.jit(do_not_specialize=["vocab"])
def _adjust_kernel(
    logits_ptr, slots_ptr, positions_ptr, seen_ptr, bias_ptr, adjusted_ptr, partial_ptr, tally_ptr, length_ptr,
    min_position_ptr, end_ids_ptr, repetition_ptr, presence_ptr, frequency_ptr, flags_ptr,
    vocab,
    STATE_WIDTH: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    at = slot * STATE_WIDTH
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    x = tl.load(logits_ptr + row * vocab + ids, mask=mask, other=float("-inf"))
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) != 0
    x = tl.where(x == x, x, float("-inf"))
    partial_ptr += row * PARTIALS * BLOCKS + block
    best = tl.max(x, 0)
    tl.store(partial_ptr + RAW_BEST * BLOCKS, best)
    tl.store(partial_ptr + RAW_LEAST * BLOCKS, tl.min(tl.where(x == float("-inf"), float("inf"), x), 0))
    tl.store(partial_ptr + RAW_SUM * BLOCKS, tl.sum(tl.exp(x - tl.where(best > float("-inf"), best, 0.0)), 0))

    repetition = tl.load(repetition_ptr + at)
    presence = tl.load(presence_ptr + at)
    frequency = tl.load(frequency_ptr + at)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = tl.load(seen_ptr + slot * vocab + ids, mask=mask, other=0)
        factor = tl.where(seen > 0, repetition, 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        count = seen >> 1
        x = x - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    if (tl.load(flags_ptr + at) & 1) != 0:
        x += tl.load(bias_ptr + slot * vocab + ids, mask=mask, other=0.0)
    if tl.load(positions_ptr + row) + 1 < tl.load(min_position_ptr + at):
        for e in tl.static_range(ENDS):
            x = tl.where(ids == tl.load(end_ids_ptr + at + e), float("-inf"), x)
    tl.store(adjusted_ptr + row * vocab + ids, x, mask=mask)
    tl.store(partial_ptr + BEST * BLOCKS, tl.where(broken, float("inf"), tl.max(x, 0)))
    if block == 0:
        words = tl.arange(0, 4 * BINS)  # of both searches
        tl.store(tally_ptr + row * 4 * BINS + words, tl.zeros_like(words).to(tl.int64))
        tl.store(length_ptr + row, 0)


@triton.jit(do_not_specialize=["vocab", "turn", "rows"])
def _pick_kernel(
    logits_ptr, adjusted_ptr, slots_ptr, positions_ptr, partial_ptr, interval_ptr, tally_ptr, winner_ptr, listed_ptr,
    length_ptr, seed_ptr, choice_ptr, temperature_ptr, top_p_ptr, min_p_ptr, flags_ptr,
    vocab, turn, rows,
    STATE_WIDTH: tl.constexpr, ID_BITS: tl.constexpr, WORDS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    at = slot * STATE_WIDTH
    interval = interval_ptr + ((turn + 1) % 2 * 2 * rows + 2 * row) * WORDS
    tallied = tally_ptr + ((turn + 2) % 3 * 2 * rows + 2 * row) * 2 * BINS
    temperature = tl.load(temperature_ptr + at)
    lo, _shift, _size, _above, _target, _kind, best = narrowed(interval, tallied, tl.load(top_p_ptr + at), ID_BITS)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    if (tl.load(flags_ptr + at) & 2) != 0:
        raw_lo = narrowed(interval + WORDS, tallied + 2 * BINS, tl.full((), 1.0, tl.float32), ID_BITS)[0]
        x = tl.load(logits_ptr + row * vocab + ids, mask=mask, other=float("-inf"))
        listed = (key_of(x, ids, ID_BITS) >= raw_lo) & (x > float("-inf"))
        if tl.max(listed.to(tl.int32), 0) != 0:
            place = tl.atomic_add(length_ptr + row + ids * 0, 1, mask=listed, sem="relaxed")
            tl.store(listed_ptr + row * LISTED + place, ids, mask=listed & (place < LISTED))
    x = tl.load(adjusted_ptr + row * vocab + ids, mask=mask, other=float("-inf"))
    if temperature >= GREEDY_BELOW:
        scaled = scaled_by(x, best, temperature)
        kept = (rank_key(scaled, ids, ID_BITS) >= lo) & (tl.exp(scaled) >= tl.load(min_p_ptr + at))
        x = tl.where(kept, x, float("-inf"))
    index = tl.load(positions_ptr + row) + 1
    seed_low, seed_high, choice = tl.load(seed_ptr + at), tl.load(seed_ptr + at + 1), tl.load(choice_ptr + at)
    kept_best, winner = block_winner(x, ids, index, seed_low, seed_high, choice, temperature, INTERPRETED)
    tl.store(winner_ptr + row * BLOCKS + block, winner)
    tl.store(partial_ptr + (row * PARTIALS + KEPT) * BLOCKS + block, tl.where(best < float("inf"), kept_best, best))


@triton.jit(do_not_specialize=["vocab"])
def _tell_kernel(
    logits_ptr, adjusted_ptr, slots_ptr, positions_ptr, partial_ptr, winner_ptr, listed_ptr, length_ptr, seen_ptr, told_ptr,
    token_ptr, position_ptr, done_ptr, limit_ptr, seed_ptr, choice_ptr, temperature_ptr, end_ids_ptr, flags_ptr,
    vocab,
    STATE_WIDTH: tl.constexpr, ENDS: tl.constexpr, ID_BITS: tl.constexpr, TOP: tl.constexpr, LISTED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    at = slot * STATE_WIDTH
    logits_ptr += row * vocab
    token = settle(
        adjusted_ptr + row * vocab, partial_ptr + (row * PARTIALS + KEPT) * BLOCKS, winner_ptr + row * BLOCKS, at,
        tl.load(positions_ptr + row) + 1, token_ptr, position_ptr, done_ptr, limit_ptr, end_ids_ptr,
        tl.load(seed_ptr + at), tl.load(seed_ptr + at + 1), tl.load(choice_ptr + at), tl.load(temperature_ptr + at),
        ENDS, BLOCKS, BLOCKS_PAD, INTERPRETED,
    )  # fmt: skip
    if token >= 0:
        seen_ptr += slot * vocab + token
        tl.store(seen_ptr, tl.load(seen_ptr) + 2)

    blocks = tl.arange(0, BLOCKS_PAD)
    partial_ptr += row * PARTIALS * BLOCKS + blocks
    bests = tl.load(partial_ptr + RAW_BEST * BLOCKS, mask=blocks < BLOCKS, other=float("-inf"))
    parts = tl.load(partial_ptr + RAW_SUM * BLOCKS, mask=blocks < BLOCKS, other=0.0)
    best = tl.max(bests, 0)
    log_total = best + log(tl.sum(parts * tl.exp(bests - best), 0), INTERPRETED)
    own = tl.load(logits_ptr + tl.maximum(token, 0)) - log_total
    place = tl.arange(0, LISTED)
    listed = place < tl.where((tl.load(flags_ptr + at) & 2) != 0, tl.load(length_ptr + row), 0)
    ids = tl.load(listed_ptr + row * LISTED + place, mask=listed, other=-1)
    values = tl.load(logits_ptr + ids, mask=listed, other=0.0)
    keys = tl.where(listed, key_of(values, ids, ID_BITS), -(1 << 62) - place.to(tl.int64))
    rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    told_ptr += row * (2 + 2 * TOP)
    tl.store(told_ptr, token)
    tl.store(told_ptr + 1, own.to(tl.int32, bitcast=True))
    tl.store(told_ptr + 2 + rank, ids, mask=rank < TOP)
    values = tl.where(listed, (values - log_total).to(tl.int32, bitcast=True), -1)
    tl.store(told_ptr + 2 + TOP + rank, values, mask=rank < TOP)


@dataclass(frozen=True)
class FullScratch:
    """What passes from launch to launch, for at most `rows` rows: logits with penalties and bias `[rows, V]`; the blocks'
    partial values `[rows, 5, blocks]` and winners; intervals of two passes, tallies of three; ids of the best, in no order."""

    adjusted: Tensor
    partial: Tensor
    winner: Tensor
    interval: Tensor
    tally: Tensor
    listed: Tensor
    length: Tensor

    @classmethod
    def make(cls, rows: int, vocab: int, device: torch.device) -> "FullScratch":
        blocks = triton.cdiv(vocab, BLOCK)
        return cls(
            torch.empty((rows, vocab), dtype=torch.float32, device=device),
            torch.empty((rows, 5, blocks), dtype=torch.float32, device=device),
            torch.empty((rows, blocks), dtype=torch.int32, device=device),
            torch.zeros((2, rows, 2, WORDS), dtype=torch.int64, device=device),
            torch.zeros((3, rows, 2, 1 << PART_BITS, 2), dtype=torch.int64, device=device),
            torch.zeros((rows, LISTED), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def sample_full(
    logits: Tensor,
    rows: Rows,
    state: SlotState,
    scratch: FullScratch,
    told: Tensor,
    interpreted: bool = False,
) -> Tensor:
    """logits `[B, V]` float32 of the step's rows -> told `[B, 42]` int32: the token drawn by the slot's parameters at positions
    + 1, -1 where the logits hold NaN or +Infinity; the bits of its log-probability; where the slot wants log-probabilities, ids
    of the 20 best (-1: none) and the bits of theirs. The slot's token, position, done and seen advance. Idle rows change none.

    Never launched with the PDL attribute: with it, a draw of one row over 128,256 ids took 127 us on an H200 (2026-11-29),
    and 101 us without. Deterministic: float sums have a fixed order, atomics add integers alone, the best are ranked after they
    were collected.
    Launches: 3 + `passes(V)`. Bytes: 4 * V to 12 * V a row to adjust, as much again for each pass that has work and to pick, in
    L2. Torch twin: runtime.sampling.draw_torch.
    """
    batch, vocab = logits.shape
    blocks, turns = triton.cdiv(vocab, BLOCK), passes(vocab)
    shape = dict(BLOCKS=blocks, STATE_WIDTH=state.token.stride(0))
    pad = triton.next_power_of_2(blocks)
    bits, ends = id_bits(vocab), state.end_ids.shape[1]
    s = scratch
    exact = launch_options(4, 1, False) | {"enable_fp_fusion": False}  # the twin rounds each product
    options = launch_options(4, 1, False)
    _adjust_kernel[(batch, blocks)](
        *(logits, rows.slots, rows.positions, state.seen, state.bias, s.adjusted, s.partial, s.tally, s.length),
        *(state.min_position, state.end_ids, state.repetition, state.presence, state.frequency, state.flags),
        vocab,
        ENDS=ends,
        BLOCK=BLOCK,
        **shape,
        **exact,
    )
    for turn in range(turns):
        narrow_kernel[(batch, blocks, 2)](
            *(logits, s.adjusted, rows.slots, s.partial, s.interval, s.tally),
            *(state.temperature, state.top_k, state.top_p, state.flags),
            *(vocab, turn, batch),
            ID_BITS=bits,
            TOP=TOP,
            WORDS=WORDS,
            FIRST=turn == 0,
            BLOCK=BLOCK,
            CHUNK=BLOCK if interpreted else CHUNK,
            BLOCKS_PAD=pad,
            DOT=dot_dtype(torch.bfloat16, interpreted),
            **shape,
            **options,
        )
    _pick_kernel[(batch, blocks)](
        *(logits, s.adjusted, rows.slots, rows.positions, s.partial, s.interval, s.tally, s.winner, s.listed, s.length),
        *(state.seed, state.choice, state.temperature, state.top_p, state.min_p, state.flags),
        *(vocab, turns, batch),
        ID_BITS=bits,
        WORDS=WORDS,
        LISTED=LISTED,
        BLOCK=BLOCK,
        BLOCKS_PAD=pad,
        INTERPRETED=interpreted,
        **shape,
        **options,
    )
    _tell_kernel[(batch,)](
        *(logits, s.adjusted, rows.slots, rows.positions, s.partial, s.winner, s.listed, s.length, state.seen, told),
        *(state.token, state.position, state.done, state.limit, state.seed, state.choice, state.temperature),
        *(state.end_ids, state.flags),
        vocab,
        ENDS=ends,
        ID_BITS=bits,
        TOP=TOP,
        LISTED=LISTED,
        BLOCKS_PAD=pad,
        INTERPRETED=interpreted,
        **shape,
        **options,
    )
    return told
