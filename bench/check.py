"""Owns `bench check`: our logits for given ids, each fed from the list and not from the sampler, written to a file and judged
against Hugging Face. Does not own Hugging Face's logits (hugging_face) or the rule (rule_n).
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from bench.contenders import random_ids
from bench.hugging_face import reference
from bench.output import json_text, require_folder
from bench.rule_n import Verdict, rule_n
from bench.session import environment, load
from models import Decoder, Loaded, ModelSource, find_model, load_tokenizer
from runtime.config import EngineConfig
from runtime.decode_graph import DecodeGraphs
from runtime.decode_step import DecodeStep, pack
from runtime.errors import ConfigError, RequestError
from runtime.request import Request, require_ids

DEFAULT_IDS = 64
TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice "
    "she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and what is the use "
    "of a book,” thought Alice “without pictures or conversations?”"
)
"""Lewis Carroll, 1865. A model is sure of what follows at some of its positions, and of none of ids that are drawn."""
STAGGER = 7
"""Positions between two neighbouring fillers, so that the rows of a step differ in length; coprime to the usual block sizes."""


@dataclass(frozen=True)
class CheckOptions:
    """The flags of `bench check`, and `wishes`, an EngineConfig for each combination of ops and graph."""

    model: str
    revision: str | None
    wishes: tuple[EngineConfig, ...]
    ids: Path | None
    prompt_ids: tuple[int, ...] | None
    prefill: int | None
    rows: int
    logits: Path | None
    against: str | None
    format: str
    flags: dict[str, Any]


def run(options: CheckOptions) -> int:
    """Play, write, judge, and print the result's JSON; exit code 1 if rule N fails. Raises QuartetError for what cannot be
    played."""
    say = partial(print, file=sys.stderr if options.format == "json" else sys.stdout, flush=True)
    if options.logits is None and options.against is None:
        raise ConfigError("nothing to do: give --logits FILE to write logits, --against transformers to judge them, or both")
    require_folder(options.logits, "--logits")
    source = find_model(options.model, options.revision)
    ids, origin = _ids(options, source)
    prefill = len(ids) // 2 if options.prefill is None else options.prefill
    if prefill > len(ids):
        raise RequestError(f"--prefill is {prefill}; allowed: 0 to the number of ids, {len(ids)}")
    loaded, modes = load(source, options.wishes, len(ids))
    decoded = f"{len(ids) - prefill} through decode steps of {options.rows} rows"
    settled = loaded.config
    title = f"bench check: {source.label}, {settled.dtype}, weights {settled.weights}, on {settled.device}"
    say(title, *loaded.notes, sep="\n- ")
    say(f"{len(ids)} ids {origin}: {prefill} through prefill, {decoded}")

    tensors: dict[str, Tensor] = {}
    for ops, graph in modes:
        step = loaded.engine.modes.step_of(ops)
        played = forced_logits(step, graph == "on", ids, prefill, settled.prefill_chunk, options.rows)
        name = f"logits.{ops}.{graph}"
        tensors |= dict(zip((name, f"{name}.last"), played, strict=False))
    if options.logits is not None:
        try:  # safetensors' own way leaves a new file in the place of a link or a device
            options.logits.write_bytes(save(tensors))
        except OSError as error:
            raise ConfigError(f"{options.logits} cannot be written: {error.strerror}") from None
        say(f"wrote {options.logits}: {', '.join(tensors)}, each {[len(ids), source.config.vocab_size]} float32")
    verdicts = _judge(loaded, ids, tensors, say) if options.against else {}
    device, passed = torch.device(settled.device), all(verdict.passed for verdict in verdicts.values())
    result = {
        "bench": "check",
        "environment": environment(device, options.flags, options.model, settled.dtype, settled.weights),
        "notes": loaded.notes,
        "ids": ids,
        "prefill": prefill,
        "logits": list(tensors),
        "greedy": {name: logits.argmax(dim=-1).tolist() for name, logits in tensors.items()},
        "rule_n": {name: verdict.as_json() for name, verdict in verdicts.items()},
        "passed": passed if options.against else None,
    }
    print(json_text(result))
    return 0 if passed else 1


def _ids(options: CheckOptions, source: ModelSource) -> tuple[list[int], str]:
    """The token ids to play, and where they are from. Raises RequestError: see `read_ids`, or an id the vocabulary lacks."""
    if options.prompt_ids is not None:
        ids, origin = list(options.prompt_ids), "as given"
    elif options.ids is not None:
        ids, origin = read_ids(options.ids), f"from {options.ids}"
    else:
        ids, origin = default_ids(source)
    require_ids(ids, source.config.vocab_size)
    return ids, origin


def read_ids(path: Path) -> list[int]:
    """The JSON list of token ids in a file. Raises RequestError: no such file, or something else in it."""
    try:
        ids = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"--ids {path}: it must hold a JSON list of token ids: {error}") from error
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise RequestError(f"--ids {path}: it must hold a JSON list of token ids, at least one, and nothing else")
    return ids


def default_ids(source: ModelSource) -> tuple[list[int], str]:
    """64 ids of a short English text, or without a tokenizer drawn evenly from the vocabulary with a fixed seed (fewer where
    the model's context is shorter), and what they are."""
    length = min(DEFAULT_IDS, source.config.max_position or DEFAULT_IDS)
    tokenizer = load_tokenizer(source) if source.has_tokenizer else None
    if tokenizer is None:
        return random_ids(source.config.vocab_size, 1, length, seed=0)[0], "drawn from the vocabulary with seed 0"
    return tokenizer.encode(TEXT)[:length], "of a short English text"


@torch.inference_mode()
def forced_logits(step: DecodeStep, graph: bool, ids: Sequence[int], prefill: int, chunk: int, rows: int = 1) -> list[Tensor]:
    """Logits at every position of `ids`, `[T, V]` float32 on the host.

    Args:
        step: an engine's decode step; its cache and state are written over.
        graph: capture the step and replay it; else play it eagerly.
        prefill: how many ids go through prefill, in chunks of `chunk`; the others are decoded one by one.
        rows: rows of every decode step, in slots 0 to rows - 1. Above 1 the ids play in row 0 and again in the last row, among
            fillers of seeded random ids at staggered positions.

    Returns:
        The logits of row 0, and with rows above 1 those of the last row.
    """
    model, state, total = step.model, step.state, len(ids)
    fillers = [(random_ids(model.vocab_size, 1, total, i)[0], (prefill + STAGGER * i) % total) for i in range(1, rows - 1)]
    played = [(ids, prefill), *fillers, (ids, prefill)][:rows]  # the ids of each row, and how many of them are prefilled
    judged = {row: torch.empty((total, model.vocab_size), dtype=torch.float32) for row in (0, rows - 1)}
    for slot, (row_ids, prefilled) in enumerate(played):
        for start in range(0, prefilled, chunk):
            end = min(start + chunk, prefilled)
            hidden = model.prefill(torch.tensor(row_ids[start:end], device=model.device), start, slot, step.cache)
            if slot in judged:
                judged[slot][start:end] = model.logits(hidden).cpu()
    state.packed[:rows] = torch.tensor(pack(Request("forced", (0,)), limit=step.cache.capacity), dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32, device=model.device)
    if graph:
        step(torch.full_like(slots, -1), "plain")  # on idle rows: compiles, and makes the workspace
        graphs = DecodeGraphs(step, slots)
        graphs.capture([rows], ["plain"])
    for number in range(total - prefill):
        positions = [(prefilled + number) % total for _, prefilled in played]  # a filler at its end begins again at 0
        tokens = [row_ids[position] for (row_ids, _), position in zip(played, positions, strict=True)]
        state.token[:rows] = torch.tensor(tokens, dtype=torch.int32, device=model.device)
        state.position[:rows] = torch.tensor(positions, dtype=torch.int32, device=model.device)
        state.done[:rows] = 0
        logits = graphs.replay(rows, "plain").logits if graph else step(slots, "plain")[1]  # [B, V]
        for row, out in judged.items():
            out[prefill + number] = logits[row]
    return list(judged.values())


def _judge(loaded: Loaded, ids: list[int], tensors: dict[str, Tensor], say: Callable[[str], None]) -> dict[str, Verdict]:
    """Rule N for every set of logits; each verdict is one line."""
    assert isinstance(loaded.engine.model, Decoder)
    float32, same_dtype = reference(ids, loaded.source.folder, loaded.engine.model)
    own = loaded.source.folder is None or loaded.config.weights != "bf16"
    how = "over our weights" if own else "read the folder"
    say(f"reference: transformers {how}, eager attention, float32 and {loaded.config.dtype}")
    verdicts = {name: rule_n(logits, float32, same_dtype) for name, logits in tensors.items()}
    for name, verdict in verdicts.items():
        say(f"{name}: {verdict}")
    if not any(verdict.decided for verdict in verdicts.values()):
        say("no position is decided, so the greedy half of the rule judges nothing here; give --ids of a real text")
    return verdicts
