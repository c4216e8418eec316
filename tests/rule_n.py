"""Hugging Face's logits for a checkpoint, ours for the same token ids, and the assertion that they agree by rule N."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.rule_n import Verdict, rule_n
from models import Decoder, find_model, load_model
from runtime.kv_cache import KVCache
from runtime.ops import SlotState, load_ops


def random_ids(count: int, vocab_size: int = 512, seed: int = 1) -> list[int]:
    """Token ids for a teacher-forced run."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def hugging_face(path: Path, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Logits `[T, V]` float32 of transformers, eager attention, in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0].float()


def open_model(path: Path, dtype: torch.dtype | None = None, max_len: int = 512, device: str = "cpu") -> Decoder:
    """The decoder of a folder, in the stored dtype unless one is given."""
    source = find_model(str(path))
    return load_model(source, torch.device(device), dtype or getattr(torch, source.config.dtype), max_len)


def play(decoder: Decoder, ids: Sequence[int], prefill: int, chunk: int = 512, ops: str = "unfused") -> Tensor:
    """Our logits `[T, V]` with every token forced: the first `prefill` in chunks, the rest one by one through decode.

    The cache starts poisoned, and what is decoded stands behind an idle row.
    """
    device = decoder.device
    shape = (decoder.num_layers, 2, decoder.num_kv_heads, len(ids), decoder.head_dim)
    poison = torch.full(shape, torch.nan, dtype=decoder.dtype, device=device)
    cache = KVCache(poison, poison.clone())
    slot, logits = 1, []
    for start in range(0, prefill, chunk):
        part = torch.tensor(ids[start : min(start + chunk, prefill)], device=device)
        logits.append(decoder.logits(decoder.prefill(part, start, slot, cache)))
    state, slot_of_row = SlotState.allocate(2, device), torch.tensor([-1, slot], dtype=torch.int32, device=device)
    played = load_ops(ops, pdl=ops == "fused" and torch.cuda.get_device_capability() >= (9, 0))
    for position in range(prefill, len(ids)):
        state.position[slot], state.token[slot] = position, ids[position]
        logits.append(decoder.decode(slot_of_row, state, cache, played)[1][1:].clone())
    return torch.cat(logits).cpu()


def judge(path: Path, ours: Tensor, ids: Sequence[int], dtype: torch.dtype, first: int = 0) -> Verdict:
    """Rule N of our logits in `dtype` for the positions from `first`; printed, and asserted."""
    reference = hugging_face(path, ids, torch.float32)[first:]
    same = None if dtype == torch.float32 else hugging_face(path, ids, dtype)[first:]
    verdict = rule_n(ours, reference, same)
    print(verdict)
    assert verdict.passed, verdict
    return verdict


def assert_greedy(path: Path, prompt: Sequence[int], tokens: Sequence[int], dtype: torch.dtype) -> int:
    """Greedy tokens are those of Hugging Face in float32 wherever that leads by more than rounding can move; how many are."""
    ids = [*prompt, *tokens]
    reference = hugging_face(path, ids, torch.float32)[len(prompt) - 1 : -1]
    same = reference if dtype == torch.float32 else hugging_face(path, ids, dtype)[len(prompt) - 1 : -1]
    first, second = reference.topk(2, dim=1).values.unbind(1)
    decided = first - second > max(4 * float((same - reference).abs().max()), 2e-3)
    assert torch.equal(torch.tensor(tokens)[decided], reference.argmax(dim=1)[decided])
    return int(decided.sum())


def assert_rule_n(path: Path, count: int = 48, prefill: int = 32, chunk: int = 16, device: str = "cpu") -> Verdict:
    """Load a folder, play random ids through prefill and decode, and hold them against Hugging Face on the CPU."""
    decoder = open_model(path, max_len=count, device=device)
    ids = random_ids(count, decoder.vocab_size)
    for ops in ("unfused", "fused") if device == "cuda" else ("unfused",):
        verdict = judge(path, play(decoder, ids, prefill, chunk, ops), ids, decoder.dtype)
    return verdict


def moved(path: Path, mistaken: Path, ids: Sequence[int]) -> float:
    """How far a mistake, written as another checkpoint, moves Hugging Face's float32 logits: proof that a case can fail."""
    difference = hugging_face(path, ids, torch.float32) - hugging_face(mistaken, ids, torch.float32)
    return float(difference.abs().max())
