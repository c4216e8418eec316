"""Engines over tiny real decoders, in every mode that a machine can play: tests are written once and run in all of them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models import Decoder
from runtime.config import EngineConfig
from runtime.device import resolve
from runtime.engine import Engine
from runtime.request import Request
from runtime.sampling import Variant
from tests.rule_n import open_model

MODES = [
    pytest.param(("cpu", "unfused", "off"), id="cpu"),
    *(
        pytest.param(("cuda", ops, graph), id=f"{ops}-{'graph' if graph == 'on' else 'eager'}", marks=pytest.mark.gpu)
        for ops in ("unfused", "fused")
        for graph in ("off", "on")
    ),
]
"""Device, ops and graph."""


def engine_over(
    model: Decoder | Path, mode: tuple[str, str, str], slots: int = 1, max_len: int = 512, prepare: bool = True, **options: Any
) -> Engine:
    """An engine over a decoder, or over a folder's, ready to serve. options: fields of EngineConfig."""
    device, ops, graph = mode
    decoder = model if isinstance(model, Decoder) else open_model(model, max_len=max_len, device=device)
    dtype = str(decoder.dtype).removeprefix("torch.")
    wish = EngineConfig(device, dtype, ops, graph, max_len=max_len, max_slots=slots, **options)  # type: ignore[arg-type]
    engine = Engine(decoder, resolve(wish, dtype)[0])
    if prepare:
        engine.prepare()
    return engine


def some_ids(count: int, seed: int, vocab: int = 512) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def recorded(engine: Engine, request: Request) -> tuple[list[int], Tensor]:
    """Run one request alone: its tokens, and the logits `[n, V]` that each was drawn from."""
    modes, seen = engine.modes, []
    first = engine.model.logits

    def logits(hidden: Tensor) -> Tensor:
        seen.append(first(hidden))
        return seen[-1]

    def play(batch: int, kind: Variant) -> Tensor:
        if modes.graph:
            played = modes.graphs[modes.ops].replay(batch, kind)
            tokens, logits = played.tokens, played.logits
        else:
            tokens, logits = modes.step_of(modes.ops)(modes._slot_of_row[:batch], kind)
        seen.append(logits.clone())
        return tokens

    with patch.object(engine.model, "logits", logits), patch.object(modes, "play", play):
        tokens = engine.generate([request])[request.id]
    return tokens, torch.cat(seen)[: len(tokens)].cpu()  # behind the last token a step may have been enqueued ahead
