"""Owns `bench check`: our logits for given ids, written to a file and judged against Hugging Face. Does not own the playing
(forced), the reference (reference) or the rule (rule_n).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.environment import environment
from bench.forced import forced_logits
from bench.hf_model import require_transformers
from bench.loading import graph_name, load
from bench.reference import reference
from bench.rule_n import Verdict
from models import Loaded, find_model
from models.decoder import Decoder
from runtime.config import EngineConfig
from runtime.errors import ConfigError, RequestError

DEFAULT_IDS, DEFAULT_SEED = 64, 0


@dataclass(frozen=True)
class CheckOptions:
    """What `bench check` was asked for.

    Attributes:
        wishes: one EngineConfig for each combination of ops and graph, with at least `rows` slots.
        ids: a JSON file with a list of token ids; None: 64 ids drawn from the model's vocabulary with seed 0.
        prefill: ids that go through prefill; None: half of them.
        rows: rows of every decode step.
        logits: safetensors file to write, or None.
        against: whether Hugging Face judges.
        json_only: whether what is told meanwhile goes to stderr, so that stdout holds the JSON line alone.
        flags: the command line, for the result.
    """

    model: str
    revision: str | None
    wishes: tuple[EngineConfig, ...]
    ids: Path | None
    prefill: int | None
    rows: int
    logits: Path | None
    against: bool
    json_only: bool
    flags: dict[str, Any]


def run(options: CheckOptions) -> int:
    """Play, write, judge, and print the result's JSON as the last line; the exit code, 1 if rule N fails.

    Raises:
        QuartetError: a file, a model or a combination of flags that cannot be played.
    """
    stream = sys.stderr if options.json_only else sys.stdout

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    if options.against:
        require_transformers()
    if options.logits is not None and not options.logits.absolute().parent.is_dir():
        raise ConfigError(f"--logits {options.logits}: the folder does not exist; make it first")
    source = find_model(options.model, options.revision)
    config = source.config
    ids = read_ids(options.ids) if options.ids is not None else drawn_ids(config.vocab_size, config.max_position)
    prefill = len(ids) // 2 if options.prefill is None else options.prefill
    _validate(ids, prefill, config.vocab_size)
    loaded, combinations = load(source, options.revision, options.wishes, len(ids), f"{len(ids)} ids")
    say(f"bench check: {loaded.source.label}, {loaded.config.dtype} on {loaded.config.device}")
    for note in loaded.notes:
        say(f"- {note}")
    origin = f"from {options.ids}" if options.ids is not None else f"drawn from the vocabulary with seed {DEFAULT_SEED}"
    say(f"{len(ids)} ids {origin}: {prefill} through prefill, {len(ids) - prefill} through decode steps of {options.rows} rows")

    tensors = _play(loaded, combinations, ids, prefill, options.rows)
    if options.logits is not None:
        save_file(tensors, options.logits)
        say(f"wrote {options.logits}: {', '.join(tensors)}, each {[len(ids), config.vocab_size]} float32")
    verdicts = _judge(loaded, ids, tensors, say) if options.against else {}
    passed = all(verdict.passed for verdict in verdicts.values())
    result = {
        "bench": "check",
        "environment": {
            **environment(torch.device(loaded.config.device)),
            "model": options.model,
            "dtype": loaded.config.dtype,
            "flags": options.flags,
        },
        "notes": loaded.notes,
        "ids": ids,
        "prefill": prefill,
        "logits": list(tensors),
        "greedy": {name: logits.argmax(dim=-1).tolist() for name, logits in tensors.items()},
        "rule_n": {name: verdict.as_json() for name, verdict in verdicts.items()},
        "passed": passed if options.against else None,
    }
    print(json.dumps(result, allow_nan=False))
    return 0 if passed else 1


def read_ids(path: Path) -> list[int]:
    """The JSON list of token ids in a file.

    Raises:
        RequestError: no such file, or something else in it.
    """
    try:
        ids = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"--ids {path}: it must hold a JSON list of token ids: {error}") from error
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise RequestError(f"--ids {path}: it must hold a JSON list of token ids, at least one, and nothing else")
    return ids


def drawn_ids(vocab_size: int, limit: int | None) -> list[int]:
    """64 ids (fewer where the model's context is shorter) drawn evenly from the vocabulary with a fixed seed."""
    generator = torch.Generator().manual_seed(DEFAULT_SEED)
    count = min(DEFAULT_IDS, limit or DEFAULT_IDS)
    return [int(token) for token in torch.randint(vocab_size, (count,), generator=generator)]


def _validate(ids: list[int], prefill: int, vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {token} is outside the vocabulary of 0 to {vocab_size - 1}")
    if not 0 <= prefill <= len(ids):
        raise RequestError(f"--prefill is {prefill}; allowed: 0 to the number of ids, {len(ids)}")


def _play(loaded: Loaded, combinations: list[EngineConfig], ids: list[int], prefill: int, rows: int) -> dict[str, Tensor]:
    """Logits of every combination by their name in the file."""
    engine = loaded.engine
    tensors: dict[str, Tensor] = {}
    for config in combinations:
        graph = graph_name(config)
        step = engine.step_of(config.ops)
        logits = forced_logits(step, graph == "on", ids, prefill, config.prefill_chunk, rows)
        name = f"logits.{config.ops}.{graph}"
        tensors |= dict(zip((name, f"{name}.last"), logits, strict=False))
    return tensors


def _judge(loaded: Loaded, ids: list[int], tensors: dict[str, Tensor], say: Callable[[str], None]) -> dict[str, Verdict]:
    """Rule N for every set of logits; each verdict is one line."""
    assert isinstance(loaded.engine.model, Decoder)
    hugging_face = reference(ids, loaded.source.path, loaded.engine.model)
    say(f"reference: {hugging_face.how}, eager attention, float32 and {loaded.config.dtype}")
    verdicts = {name: hugging_face.judge(logits) for name, logits in tensors.items()}
    for name, verdict in verdicts.items():
        say(f"{name}: {verdict}")
        if verdict.decided == 0:
            say("no position is decided, so the greedy half of the rule judges nothing here; give --ids of a real text")
    return verdicts
