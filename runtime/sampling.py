"""Owns the way from logits to tokens on the device, without a host sync. Does not own the slots' parameters (decode_step) or
the kernels that play it on CUDA (ops.sampler, ops.full_sampler): here is their torch twin, which also plays it on the CPU.

Random numbers are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), one draw for each
(request, position, id), so a seed fixes a request's numbers whatever else runs beside it.
"""

import struct
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from runtime.ops import HAS_BIAS, Rows, SlotState
from runtime.ops.full_sampler import FullScratch, sample_full
from runtime.ops.sampler import SamplerScratch, sample_rows
from runtime.ops.threshold import HIGHEST, LOWEST
from runtime.request import GREEDY_BELOW, MAX_LOGPROBS, Logprobs, SamplingParams

Variant = Literal["plain", "full"]
"""plain: greedy or temperature. full: penalties, bias, filters and log-probabilities too."""

VARIANTS: tuple[Variant, ...] = ("plain", "full")

NOT_FINITE = -1
"""The token of a row whose logits hold NaN or +Infinity: the engine ends that request with an error."""

TOLD_WORDS = 2 + 2 * MAX_LOGPROBS
"""int32 words that `full` tells of a draw: the token, its log-probability, ids of the best (-1: none), their log-probabilities;
floats by their bits. `plain` tells the token alone."""

MASS_ONE = 2.0**40
"""The most probable id's weight in the integers that top_p counts in: sums that no order of summing can change."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


class Sampler:
    """Draws a step's tokens: on CUDA in one launch, or in a few dozen small ones where more than a temperature is asked for;
    in torch on the CPU."""

    launches = 1

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int], SamplerScratch] = {}
        self._full: dict[tuple[int, int], FullScratch] = {}

    def draw(self, logits: Tensor, rows: Rows, state: SlotState, variant: Variant, pdl: bool = False) -> Tensor:
        """Logits `[B, V]` float32 of the step's rows -> what is told of each; the slots' state advances. As `draw_torch`."""
        if not logits.is_cuda:
            return draw_torch(logits, rows, state, variant)
        batch, vocab = logits.shape
        if variant == "full":
            slots = len(state.packed)  # no batch is larger
            if (slots, vocab) not in self._full:
                self._full[slots, vocab] = FullScratch.make(slots, vocab, logits.device)
            told = torch.empty((batch, TOLD_WORDS), dtype=torch.int32, device=logits.device)
            return sample_full(logits, rows, state, self._full[slots, vocab], told)
        if (batch, vocab) not in self._scratch:
            self._scratch[batch, vocab] = SamplerScratch.make(batch, vocab, logits.device)
        out = torch.empty(batch, dtype=torch.int32, device=logits.device)
        return sample_rows(logits, rows, state, self._scratch[batch, vocab], out, pdl)


def variant(params: Sequence[SamplingParams]) -> Variant:
    """The least work that serves every request of a batch; chosen on the host, when the batch changes."""
    full = any(p.filtered or p.penalised or p.logit_bias or p.logprobs is not None for p in params)
    return "full" if full else "plain"


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """First word of Philox4x32-10; keys and counters are int64 tensors holding 32-bit words, broadcast together."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = c0 * _M0, c2 * _M1  # wraps past 2^63; the 64 bits stay right
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0


def uniform(seed: Tensor, choice: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Uniforms `[B, V]` float32 in (0, 1), never an end: 23 bits and a half, exact in float32.

    Args:
        seed: `[B, 2]` int32, low and high word of the 64-bit seed.
        choice, position: `[B]` int32; position is the index the drawn token will take.
    """
    low, high = (seed.long() & _LOW).unbind(1)
    ids = torch.arange(vocab_size, device=seed.device)
    words = philox(
        (low[:, None], choice.long()[:, None]),
        (ids[None, :], position.long()[:, None], high[:, None], torch.zeros_like(ids)),
    )
    return ((words >> 9).float() + 0.5) * 2.0**-23


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits with dropped ids at -Infinity. Order: top_k, then top_p on what is left renormalised, then min_p. Among equal
    logits the lower id counts as the larger; see ops.full_sampler for those that differ by 1e-6 or have no chance.

    Args:
        logits: `[B, V]` float32, already divided by the temperature.
        top_k: `[B]` int32, below 1 keeps all; top_p, min_p: `[B]` float32.
    """
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    ids = (scaled + HIGHEST).clamp(min=LOWEST).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[1], device=logits.device)
    dropped = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    weight = scaled.gather(1, ids).exp()
    mass = (weight * MASS_ONE).long().masked_fill(dropped, 0)
    reached = mass.cumsum(dim=-1)
    wanted = (reached[:, -1].double() * top_p.double()).ceil().long().clamp(min=1)
    heavier = reached - mass  # what lies before a token; the one that crosses top_p stays
    dropped |= (heavier >= wanted[:, None]) & (top_p[:, None] < 1)
    dropped |= weight < min_p[:, None]
    dropped[:, 0] = False
    return logits.masked_fill(dropped.gather(1, ids.argsort(dim=-1)), -torch.inf)


def adjust(logits: Tensor, state: SlotState, at: Tensor) -> Tensor:
    """Logits `[B, V]` of slots `at [B]` with penalties and bias."""
    seen = state.seen[at]  # [B, V]
    repetition = torch.where(seen > 0, state.repetition[at][:, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    count = seen >> 1
    logits = logits - state.frequency[at][:, None] * count - state.presence[at][:, None] * (count > 0)
    return logits + torch.where((state.flags[at] & HAS_BIAS)[:, None] != 0, state.bias[at], 0.0)


def draw_torch(logits: Tensor, rows: Rows, state: SlotState, variant: Variant) -> Tensor:
    """Draw one token a row, at the index behind its position, by its slot's parameters, and advance the slot's state.

    Args:
        logits: `[B, V]` float32.
        rows: whose tokens; an idle row's state stays as it is.

    Returns:
        Tokens `[B]` int32 of plain draws, `[B, TOLD_WORDS]` of full ones. The token is NOT_FINITE for a row whose logits are
        not finite (its slot is done).
    """
    index = rows.positions + 1
    at = rows.slots.clamp(min=0).long()
    ends = state.end_ids[at]  # [B, 16]
    early = (index < state.min_position[at])[:, None] & (ends >= 0)
    adjusted = adjust(logits, state, at) if variant == "full" else logits
    tokens = sample(
        adjusted.scatter_add(1, ends.clamp(min=0).long(), torch.where(early, -torch.inf, 0.0)),
        variant,
        temperature=state.temperature[at],
        top_k=state.top_k[at],
        top_p=state.top_p[at],
        min_p=state.min_p[at],
        seed=state.seed[at],
        choice=state.choice[at],
        position=index,
    )
    live = rows.slots >= 0
    done = (tokens[:, None] == ends).any(dim=1) | (index >= state.limit[at]) | (tokens < 0)
    # Idle rows are aimed at slot 0 and must not touch it: their words are added as zero, the live ones as a difference.
    for words, new in ((state.token, tokens), (state.position, index), (state.done, done.int())):
        words.index_add_(0, at, torch.where(live, new - words[at], 0))
    if variant == "plain":
        return tokens
    twice = torch.where(live & (tokens >= 0), 2, 0).int()
    state.seen.index_put_((at, tokens.clamp(min=0).long()), twice, accumulate=True)
    return tell(logits, tokens)


def tell(logits: Tensor, tokens: Tensor, top: int = MAX_LOGPROBS) -> Tensor:
    """What is told of tokens `[N]` under the model's logits `[N, V]` float32: `[N, TOLD_WORDS]` int32, `top` of the best."""
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    log_total = log_total.masked_fill(log_total.isinf(), torch.nan)
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as the floats are; then the lower id first
    key = (ordered << 31) - torch.arange(logits.shape[1], device=logits.device)
    ids = key.topk(min(top, logits.shape[1])).indices
    values = logits.gather(1, ids)
    told = torch.full((len(logits), TOLD_WORDS), -1, dtype=torch.int32, device=logits.device)
    told[:, 0] = tokens
    own = logits.gather(1, tokens.clamp(min=0).long()[:, None]) - log_total
    told[:, 1:2] = own.view(torch.int32)
    told[:, 2 : 2 + ids.shape[1]] = ids.masked_fill(values == -torch.inf, -1)
    best = 2 + MAX_LOGPROBS
    told[:, best : best + ids.shape[1]] = (values - log_total).view(torch.int32)
    return told


def read_told(words: Sequence[int], top: int) -> Logprobs:
    """One row of `tell` on the host, as far as `top` alternatives."""
    floats = struct.unpack(f"<{TOLD_WORDS}f", struct.pack(f"<{TOLD_WORDS}i", *words))
    pairs = zip(words[2 : 2 + MAX_LOGPROBS], floats[2 + MAX_LOGPROBS :], strict=True)
    return Logprobs(floats[1], tuple((token, value) for token, value in pairs if token >= 0)[:top])


def sample(
    logits: Tensor,
    variant: Variant,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> Tensor:
    """logits `[B, V]` float32 -> tokens `[B]` int32; NOT_FINITE for a row that holds NaN or +Infinity.

    A draw is the Gumbel argmax of logits / temperature: exact, and one pass over the vocabulary. Rows with a temperature
    under 1e-5 are greedy. Ties go to the lowest id. `variant` must serve every row, see `variant()`; the rest is `[B]`,
    seed `[B, 2]`.
    """
    best = logits.amax(dim=-1)
    greedy = temperature < GREEDY_BELOW
    if not logits.is_cuda and greedy.all():  # on the CPU this is no sync, and it saves the noise
        scores = logits
    else:
        scaled = (logits - best[:, None]) / temperature.clamp(min=GREEDY_BELOW)[:, None]
        if variant == "full":
            scaled = filter_logits(scaled, top_k, top_p, min_p)
        noise = -torch.log(-torch.log(uniform(seed, choice, position, logits.shape[1])))
        scores = torch.where(greedy[:, None], logits, scaled + noise)
    tokens = lowest_argmax(scores)
    return torch.where(torch.isfinite(best), tokens, NOT_FINITE)


def lowest_argmax(scores: Tensor) -> Tensor:
    """Index `[B]` int32 of each row's maximum, the lowest where several are equal (torch.argmax promises no order)."""
    ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    at_top = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(at_top, ids, scores.shape[1]).amin(dim=-1).to(torch.int32)
