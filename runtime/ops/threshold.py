"""Owns the search for what a filter keeps: a threshold on ids in falling order of value, found without a sort.

Does not own what is done with it (full_sampler).

What the filters keep is a prefix of the ids in falling order, so each is a threshold on a 64-bit key: the value's bits in
order, then the lower id. A threshold is found 6 bits a pass: every block tallies how many ids and how much probability fall
into each of 64 equal parts of an interval, and the next pass goes on in the part where the wanted count or mass is reached. The
20 best are such a threshold too, searched for beside. All sums are of integers, so no order of summing changes them.
"""

from runtime.ops._triton import tl, triton
from runtime.ops.sampler import GREEDY_BELOW

CHUNK = 128
"""Ids tallied at a time."""

PART_BITS = 6
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
def key_of(values, ids, ID_BITS: tl.constexpr):
    """int64 in the order of the float32 values, equal ones by falling id."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << ID_BITS) + ((1 << ID_BITS) - 1 - ids)


@triton.jit
def scaled_by(values, best, temperature):
    return tl.div_rn(values - best, tl.zeros_like(values) + tl.maximum(temperature, GREEDY_BELOW))


@triton.jit
def rank_key(scaled, ids, ID_BITS: tl.constexpr):
    """The key that filters go by."""
    return key_of(tl.maximum(scaled + _HIGHEST, _LOWEST), ids, ID_BITS)


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
    lo = key_of(least, (1 << ID_BITS) - 1, ID_BITS)
    size = key_of(high, 0, ID_BITS) - lo + 1
    lo = tl.where(kind == FOUND, -(1 << 62), lo)
    return lo, _part_bits(size), size, tl.zeros_like(lo), target, kind, best


@triton.jit
def narrowed(interval_ptr, tally_ptr, top_p, ID_BITS: tl.constexpr):
    """The interval after a pass: the part in which the target is reached. A threshold is found where all of that part, or its
    one id, is wanted. Behind top_k, top_p is searched for in what is left."""
    lo = tl.load(interval_ptr)
    shift = tl.load(interval_ptr + 1)
    size = tl.load(interval_ptr + 2)
    above = tl.load(interval_ptr + 3)
    target = tl.load(interval_ptr + 4)
    kind = tl.load(interval_ptr + 5)
    best = tl.load(interval_ptr + 6).to(tl.int32).to(tl.float32, bitcast=True)
    bins = tl.arange(0, BINS)
    counts = tl.load(tally_ptr + 2 * bins)
    masses = tl.load(tally_ptr + 2 * bins + 1)
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
    size = tl.where(again, key_of(tl.full((), _HIGHEST, tl.float32), 0, ID_BITS) - lo + 1, tl.full((), 1, tl.int64) << shift)
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
        scaled = scaled_by(x, best, temperature)
        key = tl.where(ids < vocab, rank_key(scaled, ids, ID_BITS), -(1 << 62))
        mass = (tl.exp(scaled) * 1099511627776.0).to(tl.int64)
    else:
        x = tl.load(logits_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        key = key_of(x, ids, ID_BITS)
        mass = tl.zeros_like(key)
    return key, mass


@triton.jit(do_not_specialize=["vocab", "turn", "rows"])
def narrow_kernel(
    logits_ptr, adjusted_ptr, slots_ptr, partial_ptr, interval_ptr, tally_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, flags_ptr,
    vocab, turn, rows,
    STATE_WIDTH: tl.constexpr, ID_BITS: tl.constexpr, TOP: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
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
        lo, shift, size, above, target, kind, best = narrowed(before, tallied, top_p, ID_BITS)
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


def passes(vocab: int) -> int:
    """Passes that find any threshold: of scaled logits 25 bits and the id's, twice since top_p may come behind top_k; of raw
    ones 32. Most are found in a few; those that are left then end at once."""
    bits = id_bits(vocab)
    return max(2 * -(-(25 + bits) // PART_BITS), -(-(32 + bits) // PART_BITS))


def id_bits(vocab: int) -> int:
    return max((vocab - 1).bit_length(), 1)
