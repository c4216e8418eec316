"""Owns the way from a model and a list of wishes to loaded weights and settled configs; the impossible is told before a byte is
read. Does not own the loading itself (models).
"""

from collections.abc import Sequence
from dataclasses import replace

from models import Loaded, ModelSource, load_engine
from runtime.config import EngineConfig
from runtime.device import resolve
from runtime.errors import ConfigError


def load(
    source: ModelSource, revision: str | None, wishes: Sequence[EngineConfig], needed: int, what: str
) -> tuple[Loaded, list[EngineConfig]]:
    """Load a model once for several combinations of ops and graph.

    Args:
        source: what was found; with path None its shapes get random weights.
        wishes: one for each combination; they differ in ops and graph only.
        needed: positions that a slot must hold; the context is made this long unless max_len asks for more.
        what: who needs them, for messages.

    Returns:
        The model with the engine of the first combination, and the settled config of each different combination, in order.

    Raises:
        QuartetError: as `models.load_engine`, or a context that is too short.
    """
    limit = source.config.max_position
    if limit is not None and needed > limit:
        raise ConfigError(f"{what} need {needed} positions and {source.label} has {limit}; ask for fewer")
    asked = wishes[0].max_len
    if asked is not None and asked < needed:
        raise ConfigError(f"{what} need {needed} positions and --max-len is {asked}; raise it or leave it out")
    sized = [replace(wish, max_len=asked or max(needed, 2)) for wish in wishes]
    for wish in sized:
        resolve(wish, source.config.dtype)
    loaded = load_engine(source.name, sized[0], revision, random_weights=source.path is None, needed_len=needed)
    settled = (resolve(wish, loaded.config.dtype)[0] for wish in sized[1:])
    others = [replace(loaded.config, ops=other.ops, graph=other.graph, pdl=other.pdl) for other in settled]
    return loaded, list(dict.fromkeys([loaded.config, *others]))


def graph_name(config: EngineConfig) -> str:
    """ "on" or "off": a settled config's graph, which stays "auto" where graphs are on unless a capture fails."""
    return "off" if config.graph == "off" else "on"
