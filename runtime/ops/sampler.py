"""Owns the plain sampler in one launch: greedy or temperature, and the advance of the slots' state.

Does not own filters, penalties or logprobs (runtime.sampling), or the state's layout (decode_step): it is handed tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops import Rows, SlotState
from runtime.ops._gemv import launch_options, let_next_start, wait_for_previous
from runtime.ops._triton import tl, triton

BLOCK = 1024
GREEDY_BELOW = tl.constexpr(1e-5) if hasattr(tl, "exp") else 1e-5


@triton.jit
def log(x, INTERPRETED: tl.constexpr):
    """Natural logarithm to the last bit or so: `tl.log` is an approximation on the GPU, far off for x just under 1."""
    if INTERPRETED:
        return tl.log(x)
    return tl.extra.cuda.libdevice.log(x)


@triton.jit
def _gumbel(ids, position, seed_low, seed_high, choice, INTERPRETED: tl.constexpr):
    """Gumbel noise of each id, from the same uniforms, bit for bit, as runtime.sampling.uniform."""
    zero = ids * 0
    words, _, _, _ = tl.philox_impl(
        ids.to(tl.uint32),
        (zero + position).to(tl.uint32),
        (zero + seed_high).to(tl.uint32),
        zero.to(tl.uint32),
        (zero + seed_low).to(tl.uint32),
        (zero + choice).to(tl.uint32),
        10,
    )
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -log(-log(uniform, INTERPRETED), INTERPRETED)


@triton.jit
def lowest(scores, ids):
    """The maximum's id, the lowest where several are equal."""
    return tl.min(tl.where(scores == tl.max(scores, 0), ids, 2147483647), 0)


@triton.jit
def block_winner(x, ids, index, seed_low, seed_high, choice, temperature, INTERPRETED: tl.constexpr):
    """A block's largest logit, and the id that wins its draw."""
    best = tl.max(x, 0)
    scores = x
    if temperature >= GREEDY_BELOW:
        noise = _gumbel(ids, index, seed_low, seed_high, choice, INTERPRETED)
        scores = tl.div_rn(x - tl.where(best > float("-inf"), best, 0.0), tl.zeros_like(x) + temperature) + noise
    return best, lowest(scores, ids)


@triton.jit
def settle(
    x_ptr, best_ptr, winner_ptr, at, index, token_ptr, position_ptr, done_ptr, limit_ptr, end_ids_ptr,
    seed_low, seed_high, choice, temperature,
    ENDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A row's token, from its blocks' winners by the twin's own formula; the slot at word `at` of the state advances."""
    blocks = tl.arange(0, BLOCKS_PAD)
    mask = blocks < BLOCKS
    block_best = tl.load(best_ptr + blocks, mask=mask, other=float("-inf"), cache_modifier=".cg")
    best = tl.max(block_best, 0)
    ids = tl.load(winner_ptr + blocks, mask=mask, other=0, cache_modifier=".cg")
    scores = tl.load(x_ptr + ids, mask=mask & (block_best > float("-inf")), other=float("-inf"))
    if temperature >= GREEDY_BELOW:
        noise = _gumbel(ids, index, seed_low, seed_high, choice, INTERPRETED)
        scores = tl.div_rn(scores - best, tl.zeros_like(scores) + temperature) + noise
    token = lowest(scores, tl.where(mask, ids, 2147483647))
    token = tl.where((best > float("-inf")) & (best < float("inf")), token, -1)
    ends = tl.load(end_ids_ptr + at + tl.arange(0, ENDS))
    done = (tl.max((ends == token).to(tl.int32), 0) != 0) | (index >= tl.load(limit_ptr + at)) | (token < 0)
    tl.store(token_ptr + at, token)
    tl.store(position_ptr + at, index)
    tl.store(done_ptr + at, done.to(tl.int32))
    return token


@triton.jit(do_not_specialize=["vocab"])
def _sampler_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    token_ptr,
    position_ptr,
    done_ptr,
    limit_ptr,
    min_position_ptr,
    seed_ptr,
    choice_ptr,
    temperature_ptr,
    end_ids_ptr,
    best_ptr,
    winner_ptr,
    counter_ptr,
    out_ptr,
    vocab,
    STATE_WIDTH: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    index = tl.load(positions_ptr + row) + 1  # of the token being drawn
    at = tl.maximum(slot, 0) * STATE_WIDTH
    temperature = tl.load(temperature_ptr + at)
    seed_low = tl.load(seed_ptr + at)
    seed_high = tl.load(seed_ptr + at + 1)
    choice = tl.load(choice_ptr + at)
    wait_for_previous(PDL)
    if slot < 0:
        tl.store(out_ptr + row, 0, mask=block == 0)
        return

    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row.to(tl.int64) * vocab
    logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf"))
    broken = tl.max(((logits != logits) | (logits == float("inf"))).to(tl.int32), 0) != 0
    logits = tl.where(logits == logits, logits, float("-inf"))
    if index < tl.load(min_position_ptr + at):
        for e in tl.static_range(ENDS):
            logits = tl.where(ids == tl.load(end_ids_ptr + at + e), float("-inf"), logits)
    best, winner = block_winner(logits, ids, index, seed_low, seed_high, choice, temperature, INTERPRETED)

    # The last block of a row to arrive compares the blocks' winners.
    cell = row * BLOCKS + block
    tl.store(best_ptr + cell, tl.where(broken, float("inf"), best))
    tl.store(winner_ptr + cell, winner)
    tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
    if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel") == BLOCKS - 1:
        token = settle(
            logits_ptr, best_ptr + row * BLOCKS, winner_ptr + row * BLOCKS, at, index,
            token_ptr, position_ptr, done_ptr, limit_ptr, end_ids_ptr, seed_low, seed_high, choice, temperature,
            ENDS, BLOCKS, BLOCKS_PAD, INTERPRETED,
        )  # fmt: skip
        tl.store(out_ptr + row, token)
        tl.store(counter_ptr + row, 0)


@dataclass(frozen=True)
class SamplerScratch:
    """Each block's best logit and winning id `[B, blocks]`, and the counters `[B]`, zero between launches."""

    best: Tensor
    winner: Tensor
    counter: Tensor

    @classmethod
    def make(cls, batch: int, vocab: int, device: torch.device) -> "SamplerScratch":
        blocks = triton.cdiv(vocab, BLOCK)
        return cls(
            torch.empty((batch, blocks), dtype=torch.float32, device=device),
            torch.empty((batch, blocks), dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )


def sample_rows(
    logits: Tensor,
    rows: Rows,
    state: SlotState,
    scratch: SamplerScratch,
    out: Tensor,
    pdl: bool,
    interpreted: bool = False,
) -> Tensor:
    """logits `[B, V]` float32 of the step's rows -> out `[B]` int32: the token drawn by the slot's
    parameters, at positions + 1, -1 where the logits hold NaN or +Infinity; the slot's token, position and done advance. Idle
    rows draw 0 and leave the state.

    Philox4x32-10 and Gumbel argmax as in runtime.sampling, with the same uniforms; ties go to the lowest id; end ids cannot win
    before min_position. Each block of 1024 ids finds its winner; the last block of a row picks among the winners by the twin's
    own formula.
    Bytes: 4 * V a row, once. Torch twin: runtime.sampling.draw_torch.
    """
    batch, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    _sampler_kernel[(batch, blocks)](
        *(logits, rows.slots, rows.positions, state.token, state.position, state.done, state.limit, state.min_position),
        *(state.seed, state.choice, state.temperature, state.end_ids),
        *(scratch.best, scratch.winner, scratch.counter, out),
        vocab,
        STATE_WIDTH=state.token.stride(0),
        ENDS=state.end_ids.shape[1],
        BLOCK=BLOCK,
        BLOCKS=blocks,
        BLOCKS_PAD=triton.next_power_of_2(blocks),
        INTERPRETED=interpreted,
        PDL=pdl,
        **launch_options(4, 1, pdl),
    )
    return out
