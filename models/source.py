"""Owns finding a model: what MODEL names, what kind it is and which ids end its answers. Loads no weights."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models import hub, random_weights
from models.config import ModelConfig
from models.demo import demo_folder
from models.fields import Fields
from models.layout import pieces
from models.weights import WeightFiles
from runtime.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found and checked, not loaded.

    Attributes:
        name: as typed.
        label: short name for outputs, and the one a server answers to.
        path: its folder; None: the weights are random.
        config: with the dtype and the tying that the weight files show.
        end_ids: ids that end an answer.
        note: what every output must say of it, or None.
    """

    name: str
    label: str
    path: Path | None
    config: ModelConfig
    end_ids: tuple[int, ...] = ()
    note: str | None = None

    def with_random_weights(self) -> "ModelSource":
        """The same shapes with random weights, no tokenizer and no limit of positions."""
        config = replace(self.config, max_position=None)
        return replace(self, path=None, config=config, end_ids=(), note=f"random weights, seed {random_weights.SEED}")


def find_model(name: str, revision: str | None = None, weights: bool = True) -> ModelSource:
    """What MODEL names: `demo`, `random:<shape>`, a local folder, or a Hugging Face hub id.

    Args:
        revision: branch, tag or commit of a hub id.
        weights: whether the weight files must be there; False fetches and checks the config alone.

    Raises:
        CheckpointError: nothing of that name, or its files are missing, damaged or contradict each other.
        UnsupportedModelError: a model that Quartet does not run.
        ConfigError: a revision of something that has none.
    """
    folder = Path(name).expanduser()
    made = name.startswith(random_weights.PREFIX)
    if revision is not None and (made or name == "demo" or folder.exists()):
        raise ConfigError(f"--revision names a version on the Hugging Face hub and {name} is not from there; leave it out")
    if made:
        return _random(name)
    if name == "demo":
        source = _read(name, "demo", demo_folder(), weights)
        return replace(source, note="demo model: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) widened to bfloat16")
    if name and folder.is_dir():
        return _read(name, folder.resolve().name, folder, weights)
    if name and folder.exists():
        raise CheckpointError(f"{name} is a file; give the folder that holds config.json and the weights")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{name!r} is no folder; give `demo`, a local folder, a Hugging Face hub id or `random:<shape>`")
    return _read(name, name, hub.fetch(name, revision, weights), weights)


def end_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: the union of what config.json, generation_config.json and the tokenizer name, in that order."""
    found = list(Fields.read(path / "config.json").token_ids("eos_token_id"))
    if (path / "generation_config.json").is_file():
        found += Fields.read(path / "generation_config.json").token_ids("eos_token_id")
    found += _tokenizer_end_id(path)
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        log.warning("%s: end ids %s are outside the vocabulary of %d and are left out", path, outside, vocab_size)
    return tuple(token for token in dict.fromkeys(found) if token not in outside)


def _random(name: str) -> ModelSource:
    shape = name.removeprefix(random_weights.PREFIX)
    if shape not in random_weights.SHAPES:
        raise CheckpointError(f"{name} is unknown; random models: {', '.join(random_weights.SHAPES)}")
    return ModelSource(name, name, None, random_weights.SHAPES[shape]).with_random_weights()


def _read(name: str, label: str, path: Path, weights: bool) -> ModelSource:
    config = ModelConfig.from_dir(path)
    if weights:
        files = WeightFiles(path)
        config, surprises = files.settle(config)
        for sentence in surprises:
            log.warning("%s: %s", path, sentence)
        for unused in files.check(pieces(config), config.tied):
            log.warning("%s: tensor %s is not part of the model and is left out", path, unused)
    return ModelSource(name, label, path, config, end_ids(path, config.vocab_size))


def _tokenizer_end_id(path: Path) -> list[int]:
    """The id of the tokenizer's eos_token, read from its files: loading a tokenizer takes seconds."""
    if not (path / "tokenizer_config.json").is_file():
        return []
    settings = Fields.read(path / "tokenizer_config.json").data
    token = _content(settings.get("eos_token"))
    if token is None:
        return []
    added = settings.get("added_tokens_decoder")
    for key, entry in (added if isinstance(added, dict) else {}).items():
        if _content(entry) == token and str(key).isdigit():
            return [int(key)]
    if not (path / "tokenizer.json").is_file():
        return []
    tokenizer = Fields.read(path / "tokenizer.json")
    entries = tokenizer.data.get("added_tokens") or []
    found = [entry.get("id") for entry in entries if isinstance(entry, dict) and entry.get("content") == token]
    vocab = tokenizer.table("model").get("vocab")
    if not found and isinstance(vocab, dict):
        found = [vocab.get(token)]
    return [token_id for token_id in found if isinstance(token_id, int)]


def _content(token: Any) -> str | None:
    """A token is spelled as a string or as an object with its content."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
