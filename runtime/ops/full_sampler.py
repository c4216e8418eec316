"""Owns the full sampler: penalties, bias, top_k, top_p, min_p and log-probabilities, in small launches and without a sort.

Does not own the plain draw, whose noise and end it shares (sampler), or the state's layout (it is handed tensors).

What the filters keep is a prefix of the ids in falling order, so each is a threshold on a 64-bit key: the value's bits in
order, then the lower id. A threshold is found 6 bits a pass: every block tallies how many ids and how much probability fall
into each of 64 equal parts of an interval, and the next pass goes on in the part where the wanted count or mass is reached. The
20 best are such a threshold too, searched for beside. All sums are of integers, so no order of summing changes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops import Rows, SlotState
from runtime.ops._gemv import dot_dtype, launch_options, let_next_start, wait_for_previous
from runtime.ops._triton import tl, triton
from runtime.ops.sampler import BLOCK, GREEDY_BELOW, block_winner, log, settle

CHUNK = 128
"""Ids tallied at a time."""

PART_BITS = 6
TOP = 20
LISTED = 32
"""Places for the ids of the best: TOP, padded."""

WORDS = 8
"""Of an interval, int64: 0 its least key, 1 log2 of a part's size, 2 its size, 3 what lies above it, 4 what is to be reached, 5
what is searched for, 6 the bits of the row's largest adjusted logit."""

FOUND, COUNT, SHARE, MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BINS = tl.constexpr(1 << PART_BITS)
BIN_BITS = tl.constexpr(PART_BITS)
BEST, RAW_BEST, RAW_LEAST, RAW_SUM, KEPT = (tl.constexpr(i) for i in range(5))
PARTIALS = tl.constexpr(5)
HIGHEST, LOWEST = -2.0, -31.9
"""Scaled logits are ranked once the best is moved to -2 and all under -31.9 are lifted to it: four octaves of floats, which
their bits divide evenly. What that ties differs by 1e-6 at most, or has no chance: the draw's noise spans 20."""
_HIGHEST, _LOWEST = tl.constexpr(HIGHEST), tl.constexpr(LOWEST)


@triton.jit
def _key(values, ids, ID_BITS: tl.constexpr):
    """int64 in the order of the float32 values, equal ones by falling id."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << ID_BITS) + ((1 << ID_BITS) - 1 - ids)


@triton.jit
def _scaled(values, best, temperature):
    return tl.div_rn(values - best, tl.zeros_like(values) + tl.maximum(temperature, GREEDY_BELOW))


@triton.jit
def _rank_key(scaled, ids, ID_BITS: tl.constexpr):
    """The key that filters go by."""
    return _key(tl.maximum(scaled + _HIGHEST, _LOWEST), ids, ID_BITS)


@triton.jit
def _part_bits(size):
    """log2 of the parts' size, so that 64 of them hold `size` keys."""
    bits = tl.arange(0, 64)
    return tl.sum(((size - 1) >> tl.minimum(bits + BIN_BITS, 62) > 0).to(tl.int64), 0)


@triton.jit
def _over(partial_ptr, row, which, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, least: tl.constexpr):
    """The largest, or the least, of one of the blocks' partial values."""
    blocks = tl.arange(0, BLOCKS_PAD)
    other = float("inf") if least else float("-inf")
    values = tl.load(partial_ptr + (row * PARTIALS + which) * BLOCKS + blocks, mask=blocks < BLOCKS, other=other)
    return tl.min(values, 0) if least else tl.max(values, 0)


@triton.jit(do_not_specialize=["vocab"])
def _adjust_kernel(
    logits_ptr, slots_ptr, positions_ptr, seen_ptr, bias_ptr, adjusted_ptr, partial_ptr, tally_ptr, length_ptr,
    min_position_ptr, end_ids_ptr, repetition_ptr, presence_ptr, frequency_ptr, flags_ptr,
    vocab,
    STATE_WIDTH: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
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


@triton.jit
def _first(
    partial_ptr, row, search, flags, temperature, top_k, top_p, vocab,
    ID_BITS: tl.constexpr, TOP: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    """The interval before the first pass, and the largest adjusted logit."""
    best = _over(partial_ptr, row, BEST, BLOCKS, BLOCKS_PAD, False)
    if search == 0:
        kind = tl.where((top_k > 0) & (top_k < vocab), COUNT, tl.where(top_p < 1, SHARE, FOUND))
        kind = tl.where(temperature < GREEDY_BELOW, FOUND, kind)
        target = top_k.to(tl.int64)
        least = tl.full((), _LOWEST, tl.float32)
        high = tl.full((), _HIGHEST, tl.float32)
    else:
        kind = tl.where((flags & 2) != 0, COUNT, FOUND)
        target = tl.full((), TOP, tl.int64)
        least = _over(partial_ptr, row, RAW_LEAST, BLOCKS, BLOCKS_PAD, True)
        high = _over(partial_ptr, row, RAW_BEST, BLOCKS, BLOCKS_PAD, False)
    kind = tl.where((best > float("-inf")) & (best < float("inf")), kind, FOUND).to(tl.int64)
    lo = _key(least, (1 << ID_BITS) - 1, ID_BITS)
    size = _key(high, 0, ID_BITS) - lo + 1
    lo = tl.where(kind == FOUND, -(1 << 62), lo)
    return lo, _part_bits(size), size, tl.zeros_like(lo), target, kind, best


@triton.jit
def _narrowed(interval_ptr, tally_ptr, top_p, ID_BITS: tl.constexpr):
    """The interval after a pass: the part in which the target is reached. A threshold is found where all of that part, or its
    one id, is wanted. Behind top_k, top_p is searched for in what is left."""
    # Past the first-level cache: under PDL a block two launches back may have filled it after this launch began.
    lo = tl.load(interval_ptr, cache_modifier=".cg")
    shift = tl.load(interval_ptr + 1, cache_modifier=".cg")
    size = tl.load(interval_ptr + 2, cache_modifier=".cg")
    above = tl.load(interval_ptr + 3, cache_modifier=".cg")
    target = tl.load(interval_ptr + 4, cache_modifier=".cg")
    kind = tl.load(interval_ptr + 5, cache_modifier=".cg")
    best = tl.load(interval_ptr + 6, cache_modifier=".cg").to(tl.int32).to(tl.float32, bitcast=True)
    bins = tl.arange(0, BINS)
    counts = tl.load(tally_ptr + 2 * bins, cache_modifier=".cg")
    masses = tl.load(tally_ptr + 2 * bins + 1, cache_modifier=".cg")
    stats = tl.where(kind == COUNT, counts, masses)
    total = above + tl.sum(stats, 0)
    wanted = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
    target = tl.where(kind == SHARE, tl.maximum(wanted, 1), tl.minimum(target, total))
    reached = total - tl.cumsum(stats, 0) + stats
    part = tl.max(tl.where(reached >= target, bins, 0), 0)
    here = bins == part
    last = tl.sum(tl.where(here, reached, 0), 0)
    alone = tl.sum(tl.where(here, counts, 0), 0) <= 1
    found = alone | (shift == 0) | ((kind == COUNT) & (last == target))
    again = found & (kind == COUNT) & (top_p < 1)
    lo = tl.where(kind == FOUND, lo, lo + (part.to(tl.int64) << shift))
    size = tl.where(again, _key(tl.full((), _HIGHEST, tl.float32), 0, ID_BITS) - lo + 1, tl.full((), 1, tl.int64) << shift)
    above = tl.where(again, 0, last - tl.sum(tl.where(here, stats, 0), 0))
    shift = tl.where(again, _part_bits(size), tl.maximum(shift - BIN_BITS, 0))
    after = tl.where(again, SHARE, tl.where(found, FOUND, tl.where(kind == SHARE, MASS, kind)))
    kind = tl.where(kind == FOUND, FOUND, after).to(tl.int64)
    return lo, shift, size, above, target, kind, best


@triton.jit
def _weighed(logits_ptr, adjusted_ptr, search, row, ids, vocab, best, temperature, ID_BITS: tl.constexpr):
    """Keys of ids, and their masses in units of 2^-40 of the best's."""
    if search == 0:
        x = tl.load(adjusted_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        scaled = _scaled(x, best, temperature)
        key = tl.where(ids < vocab, _rank_key(scaled, ids, ID_BITS), -(1 << 62))
        mass = (tl.exp(scaled) * 1099511627776.0).to(tl.int64)
    else:
        x = tl.load(logits_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        key = _key(x, ids, ID_BITS)
        mass = tl.zeros_like(key)
    return key, mass


@triton.jit(do_not_specialize=["vocab", "turn", "rows"])
def _narrow_kernel(
    logits_ptr, adjusted_ptr, slots_ptr, partial_ptr, interval_ptr, tally_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, flags_ptr,
    vocab, turn, rows,
    STATE_WIDTH: tl.constexpr, ID_BITS: tl.constexpr, TOP: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    search = tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    at = tl.maximum(slot, 0) * STATE_WIDTH  # no branch here: all loads are on their way at once
    temperature = tl.load(temperature_ptr + at)
    top_p = tl.where(search == 0, tl.load(top_p_ptr + at), 1.0)
    cell = 2 * row + search
    if FIRST:
        lo, shift, size, above, target, kind, best = _first(
            partial_ptr, row, search, tl.load(flags_ptr + at), temperature, tl.load(top_k_ptr + at), top_p, vocab,
            ID_BITS, TOP, BLOCKS, BLOCKS_PAD,
        )  # fmt: skip
    else:
        before = interval_ptr + ((turn + 1) % 2 * 2 * rows + cell) * WORDS
        tallied = tally_ptr + ((turn + 2) % 3 * 2 * rows + cell) * 2 * BINS
        lo, shift, size, above, target, kind, best = _narrowed(before, tallied, top_p, ID_BITS)
    bins = tl.arange(0, BINS)
    if block == 0:
        now = interval_ptr + (turn % 2 * 2 * rows + cell) * WORDS
        tl.store(now, lo)
        tl.store(now + 1, shift)
        tl.store(now + 2, size)
        tl.store(now + 3, above)
        tl.store(now + 4, target)
        tl.store(now + 5, kind)
        tl.store(now + 6, best.to(tl.int32, bitcast=True).to(tl.int64))
        following = tally_ptr + ((turn + 1) % 3 * 2 * rows + cell) * 2 * BINS
        tl.store(following + 2 * bins, tl.zeros_like(bins).to(tl.int64))
        tl.store(following + 2 * bins + 1, tl.zeros_like(bins).to(tl.int64))
    if (kind == FOUND) | (slot < 0):
        return

    ids = block * BLOCK + tl.arange(0, BLOCK)
    key, _ = _weighed(logits_ptr, adjusted_ptr, search, row, ids, vocab, best, temperature, ID_BITS)
    if tl.max(((key >= lo) & (key - lo < size)).to(tl.int32), 0) == 0:
        return

    # A tally is a product of matrices: which part an id falls into, times its mass byte by byte (and a 1, to be counted). Bytes
    # are exact in bfloat16 and their sums in float32.
    column = tl.arange(0, 16)
    sums = tl.zeros((BINS, 16), tl.float32)
    for c in tl.static_range(BLOCK // CHUNK):
        ids = block * BLOCK + c * CHUNK + tl.arange(0, CHUNK)
        key, mass = _weighed(logits_ptr, adjusted_ptr, search, row, ids, vocab, best, temperature, ID_BITS)
        offset = key - lo
        part = tl.where((offset >= 0) & (offset < size), offset >> shift, -1).to(tl.int32)
        parts = (bins[:, None] == part[None, :]).to(tl.float32).to(DOT)
        byte = (mass[:, None] >> (8 * tl.minimum(column, 7))[None, :]) & 255
        byte = tl.where((column == 8)[None, :], 1, tl.where((column < 6)[None, :], byte, 0))
        sums = tl.dot(parts, byte.to(tl.float32).to(DOT), sums, input_precision="ieee")
    count = tl.sum(tl.where((column == 8)[None, :], sums, 0.0), 1).to(tl.int64)
    weighed = tl.where((column < 6)[None, :], sums, 0.0).to(tl.int64) << (8 * tl.minimum(column, 7))[None, :]
    tally = tally_ptr + (turn % 3 * 2 * rows + cell) * 2 * BINS + 2 * bins
    tl.atomic_add(tally, count, mask=count > 0, sem="relaxed")
    tl.atomic_add(tally + 1, tl.sum(weighed, 1), mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["vocab", "turn", "rows"])
def _pick_kernel(
    logits_ptr, adjusted_ptr, slots_ptr, positions_ptr, partial_ptr, interval_ptr, tally_ptr, winner_ptr, listed_ptr,
    length_ptr, seed_ptr, choice_ptr, temperature_ptr, top_p_ptr, min_p_ptr, flags_ptr,
    vocab, turn, rows,
    STATE_WIDTH: tl.constexpr, ID_BITS: tl.constexpr, WORDS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    at = slot * STATE_WIDTH
    interval = interval_ptr + ((turn + 1) % 2 * 2 * rows + 2 * row) * WORDS
    tallied = tally_ptr + ((turn + 2) % 3 * 2 * rows + 2 * row) * 2 * BINS
    temperature = tl.load(temperature_ptr + at)
    lo, _shift, _size, _above, _target, _kind, best = _narrowed(interval, tallied, tl.load(top_p_ptr + at), ID_BITS)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    if (tl.load(flags_ptr + at) & 2) != 0:
        raw_lo = _narrowed(interval + WORDS, tallied + 2 * BINS, tl.full((), 1.0, tl.float32), ID_BITS)[0]
        x = tl.load(logits_ptr + row * vocab + ids, mask=mask, other=float("-inf"))
        listed = (_key(x, ids, ID_BITS) >= raw_lo) & (x > float("-inf"))
        if tl.max(listed.to(tl.int32), 0) != 0:
            place = tl.atomic_add(length_ptr + row + ids * 0, 1, mask=listed, sem="relaxed")
            tl.store(listed_ptr + row * LISTED + place, ids, mask=listed & (place < LISTED))
    x = tl.load(adjusted_ptr + row * vocab + ids, mask=mask, other=float("-inf"))
    if temperature >= GREEDY_BELOW:
        scaled = _scaled(x, best, temperature)
        kept = (_rank_key(scaled, ids, ID_BITS) >= lo) & (tl.exp(scaled) >= tl.load(min_p_ptr + at))
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
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
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
    keys = tl.where(listed, _key(values, ids, ID_BITS), -(1 << 62) - place.to(tl.int64))
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


def passes(vocab: int) -> int:
    """Passes that find any threshold: of scaled logits 25 bits and the id's, twice since top_p may come behind top_k; of raw
    ones 32. Most are found in a few; those that are left then end at once."""
    bits = _id_bits(vocab)
    return max(2 * -(-(25 + bits) // PART_BITS), -(-(32 + bits) // PART_BITS))


def _id_bits(vocab: int) -> int:
    return max((vocab - 1).bit_length(), 1)


def sample_full(
    logits: Tensor,
    rows: Rows,
    state: SlotState,
    scratch: FullScratch,
    told: Tensor,
    pdl: bool,
    interpreted: bool = False,
) -> Tensor:
    """logits `[B, V]` float32 of the step's rows -> told `[B, 42]` int32: the token drawn by the slot's parameters at positions
    + 1, -1 where the logits hold NaN or +Infinity; the bits of its log-probability; where the slot wants log-probabilities, ids
    of the 20 best (-1: none) and the bits of theirs. The slot's token, position, done and seen advance. Idle rows change none.

    Deterministic: float sums have a fixed order, atomics add integers alone, and the best are ranked after they were collected.
    Launches: 3 + `passes(V)`. Bytes: 4 * V to 12 * V a row to adjust, as much again for each pass that has work and to pick, in
    L2. Torch twin: runtime.sampling.draw_torch.
    """
    batch, vocab = logits.shape
    blocks, turns = triton.cdiv(vocab, BLOCK), passes(vocab)
    shape = dict(BLOCKS=blocks, PDL=pdl, STATE_WIDTH=state.token.stride(0))
    pad = triton.next_power_of_2(blocks)
    bits, ends = _id_bits(vocab), state.end_ids.shape[1]
    s = scratch
    exact = launch_options(4, 1, pdl) | {"enable_fp_fusion": False}  # the twin rounds each product
    options = launch_options(4, 1, pdl)
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
        _narrow_kernel[(batch, blocks, 2)](
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
