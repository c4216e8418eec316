"""Owns the way from logits to tokens on the device, without a host sync. Does not own the slots' parameters (decode_step).

Random numbers are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), one draw for each
(request, position, id), so a seed fixes a request's numbers whatever else runs beside it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from runtime.request import GREEDY_BELOW, SamplingParams

Variant = Literal["greedy", "temperature", "filtered"]

NOT_FINITE = -1
"""The token of a row whose logits hold NaN or +Infinity: the engine ends that request with an error."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def variant(params: Sequence[SamplingParams]) -> Variant:
    """The least work that serves every request of a batch; chosen on the host, when the batch changes."""
    if all(p.greedy for p in params):
        return "greedy"
    return "filtered" if any(p.filtered for p in params) else "temperature"


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
    """Logits with dropped ids at -Infinity. Order: top_k, then top_p on what is left renormalised, then min_p.

    Args:
        logits: `[B, V]` float32, already divided by the temperature.
        top_k: `[B]` int32, below 1 keeps all; top_p, min_p: `[B]` float32.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    dropped = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    p = torch.softmax(ordered.masked_fill(dropped, -torch.inf), dim=-1)
    heavier = p.cumsum(dim=-1) - p  # what lies before a token; the one that crosses top_p stays
    dropped |= (heavier >= top_p[:, None]) & (top_p[:, None] < 1)
    dropped |= p < min_p[:, None] * p[:, :1]
    dropped[:, 0] = False
    return logits.masked_fill(dropped.gather(1, ids.argsort(dim=-1)), -torch.inf)


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
    if variant == "greedy":
        scores = logits
    else:
        greedy = (temperature < GREEDY_BELOW)[:, None]
        scaled = (logits - best[:, None]) / temperature.clamp(min=GREEDY_BELOW)[:, None]
        if variant == "filtered":
            scaled = filter_logits(scaled, top_k, top_p, min_p)
        noise = -torch.log(-torch.log(uniform(seed, choice, position, logits.shape[1])))
        scores = torch.where(greedy, logits, scaled + noise)
    tokens = lowest_argmax(scores)
    return torch.where(torch.isfinite(best), tokens, NOT_FINITE)


def lowest_argmax(scores: Tensor) -> Tensor:
    """Index `[B]` int32 of each row's maximum, the lowest where several are equal (torch.argmax promises no order)."""
    ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    at_top = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(at_top, ids, scores.shape[1]).amin(dim=-1).to(torch.int32)
