"""Owns the tuner behind `bench kernels --tune`: coordinate descent over the fused kernels' tiles by the time of whole steps.

Does not own the tiles in use (runtime.ops.configs) or their file (runtime.ops.tuned). A kernel's time alone misleads: with PDL
its neighbour's ramp counts too, so a tile is judged by the graph of a whole step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from bench.steps import Play, WholeSteps, median, require_device
from models.config import ModelConfig
from runtime.ops.attention import attention_tile
from runtime.ops.configs import Kernel, Tile, fits, tile_for
from runtime.ops.fused import FusedOps
from runtime.ops.tuned import TileKey, Tiles

GAIN = 0.002
"""A tile is taken if the step is shorter by this share, twice: about what two timings of one graph differ by."""


@dataclass
class Found:
    """The tiles in use so far, the one that reads most bytes first, and the step's time with them; lm_head: the key of the
    projection whose sums nobody adds, so that it has no splits."""

    tiles: Tiles
    start_ms: float = 0.0
    ms: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)
    lm_head: TileKey | None = None

    def ops(self, pdl: bool) -> FusedOps:
        return FusedOps(pdl, tiles=self.tiles)


def start_from(config: ModelConfig, steps: WholeSteps, itemsize: int, weights: str, pdl: bool) -> Found:
    """The built-in tiles of every kernel of a step."""
    c, q, kv = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    keys: list[tuple[Kernel, int, int]] = [
        ("norm_gate_up", c.intermediate_size, c.hidden_size),
        ("proj_residual", c.hidden_size, c.intermediate_size),
        ("norm_linear", q + 2 * kv, c.hidden_size),
        ("proj_residual", c.hidden_size, q),
        ("norm_linear", c.vocab_size, c.hidden_size),
    ]
    of_layers = 1 if weights == "fp8" and itemsize == 2 else itemsize
    sizes = [of_layers] * 4 + [itemsize]  # the LM head is dense
    tiles: dict[TileKey, Any] = {
        TileKey.of(kernel, steps.batch, out, width, size): tile_for(kernel, out, width, steps.batch, size)
        for (kernel, out, width), size in zip(keys, sizes, strict=True)
    }
    attention = attention_tile(steps.attention, steps.batch, itemsize)
    lm_head = TileKey.of("norm_linear", steps.batch, c.vocab_size, c.hidden_size, itemsize)
    return Found(tiles | {TileKey.of("attention", steps.batch, q, kv, itemsize): attention}, lm_head=lm_head)


def tune(found: Found, steps: WholeSteps, pdl: bool, seconds: float, say: Callable[[str], None]) -> Found:
    """Try every neighbour of every tile, keep what makes the step shorter, until nothing does or the time is over."""
    deadline = time.monotonic() + seconds
    play = steps.graph(found.ops(pdl))
    expected = _logits(steps, play)
    found.start_ms = found.ms = median(steps.ms(play))
    say(f"batch {steps.batch}: {found.ms:.4f} ms with the tiles in use")
    improved, tried = True, set[Any]()
    while improved:
        improved = False
        for key in list(found.tiles):
            for tile in neighbours(found.tiles[key], key, key == found.lm_head):
                if time.monotonic() > deadline:
                    say("the time is over; --tune-seconds gives more")
                    return found
                if (key, tile) not in tried:
                    tried.add((key, tile))
                    improved |= _try(found, key, tile, steps, pdl, expected, say)
    return found


def neighbours(tile: Any, key: TileKey, lm_head: bool = False) -> Iterator[Any]:
    """Tiles one move away: a number halved or doubled, a switch turned, within what the kernels allow."""
    most = {
        "warps": 16,
        "stages": 8,
        "splits": 8,
        "block": 256,
        "min_keys": 512,
        "blocks_per_sm": 8,
        "ahead": 16,
        "registers": 240,
    }
    single, attention = key.rows == "single", key.kernel == "attention"
    least = {"registers": 48} if single or attention else {"rows": 16, "k_slice": 16}
    if not attention:
        most |= {"rows": min(256, key.out), "k_slice": key.width}
        if single:
            most |= {"splits": 0, "stages": 0}  # one row's kernels have neither
        else:
            most |= {"ahead": 0} | ({"splits": 0} if lm_head or key.kernel == "norm_gate_up" else {})
    for each in fields(tile):
        value = getattr(tile, each.name)
        moves = [not value] if isinstance(value, bool) else [value // 2, value * 2 or 1] if isinstance(value, int) else []
        if each.name == "stages":
            moves = [value - 1, value + 1, value + 2]
        for move in moves:
            if isinstance(move, bool) or least.get(each.name, 1) <= move <= most.get(each.name, 1 << 30):
                found = replace(tile, **{each.name: move})
                if not isinstance(found, Tile) or fits(found, key.kernel, key.out, key.width, single, key.itemsize):
                    yield found


def _try(
    found: Found, key: TileKey, tile: Any, steps: WholeSteps, pdl: bool, expected: Tensor, say: Callable[[str], None]
) -> bool:
    """Whether the tile was taken. One that does not compile or gives other logits is passed over."""
    trial = replace(found, tiles={**found.tiles, key: tile})
    try:
        play = steps.graph(trial.ops(pdl))
        close = torch.allclose(_logits(steps, play), expected, rtol=0.05, atol=float(0.05 * expected.abs().max()))
        ms = median(steps.ms(play)) if close else float("inf")
        if ms < found.ms * (1 - GAIN):
            ms = max(ms, median(steps.ms(play)))
    except Exception as error:  # Triton and ptxas raise types of their own; whatever it is, this tile is none
        require_device(steps.device, error)
        say(f"  {key} {tile}: refused: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        return False
    taken = ms < found.ms * (1 - GAIN)
    found.log.append({"kernel": str(key), "tile": asdict(tile), "ms": ms if close else None, "taken": taken})
    say(f"  {key} {tile}: {f'{ms:.4f} ms' if close else 'other logits'}{' <- taken' if taken else ''}")
    if taken:
        found.tiles, found.ms = trial.tiles, ms
    return taken


def _logits(steps: WholeSteps, play: Play) -> Tensor:
    steps.reset()
    logits = play()
    assert isinstance(logits, Tensor)
    return logits.clone()
