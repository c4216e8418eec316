"""Owns finding a model: what MODEL names, the fetch from the Hugging Face hub, which ids end an answer. Loads no weights."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download
from tokenizers import Tokenizer

from models import random_weights
from models.config import ModelConfig
from models.demo import demo_folder
from models.fields import Fields
from models.weights import WeightFiles
from runtime.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

DESCRIPTION = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"]
DESCRIPTION += ["vocab.json", "merges.txt", "chat_template*"]
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
"""Not every *.safetensors: some repositories hold the same weights once more in another layout."""

HUB_ERRORS: dict[type[Exception], str] = {
    errors.HFValidationError: "is neither a folder here nor a Hugging Face hub id",
    errors.GatedRepoError: "is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`",
    errors.RevisionNotFoundError: "has no revision {revision!r}",
    errors.RepositoryNotFoundError: "is neither a folder here nor a public model on the Hugging Face hub; check the spelling, "
    "or run `hf auth login` if it is private",
    errors.LocalEntryNotFoundError: "is not in the Hugging Face cache and the hub cannot be reached; run `hf download {name}` "
    "on a machine that is online, or give a local folder",
    Exception: "cannot be fetched from the Hugging Face hub: {reason}",
}
"""What to say after the model's name, by the first class that fits."""


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
    try:
        folder = Path(name).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no such user
        raise CheckpointError(f"MODEL {name[:80]!r} cannot be a path: {error.__class__.__name__}; give another name") from None
    made = name.startswith(random_weights.PREFIX)
    if revision is not None and (made or name == "demo" or folder.exists()):
        raise ConfigError(f"--revision names a version on the Hugging Face hub and {name} is not from there; leave it out")
    if made:
        shape = random_weights.SHAPES.get(name.removeprefix(random_weights.PREFIX))
        if shape is None:
            raise CheckpointError(f"{name} is unknown; random models: {', '.join(random_weights.SHAPES)}")
        return ModelSource(name, name, None, shape).with_random_weights()
    if name == "demo":
        source = _read(name, "demo", demo_folder(), weights)
        return replace(source, note="demo model: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) widened to bfloat16")
    if name and folder.is_dir():
        return _read(name, folder.resolve().name, folder, weights)
    if name and folder.exists():
        raise CheckpointError(f"{name} is a file; give the folder that holds config.json and the weights")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{name!r} is no folder; give `demo`, a local folder, a Hugging Face hub id or `random:<shape>`")
    return _read(name, name, _fetch(name, revision, weights), weights)


def end_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: the union of what config.json, generation_config.json and the tokenizer name, in that order."""
    files = [file for file in (path / "config.json", path / "generation_config.json") if file.is_file()]
    found = [token for file in files for token in Fields.read(file).token_ids("eos_token_id")] + _tokenizer_end_id(path)
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        log.warning("%s: end ids %s are outside the vocabulary of %d and are left out", path, outside, vocab_size)
    return tuple(token for token in dict.fromkeys(found) if token not in outside)


def _fetch(name: str, revision: str | None, weights: bool) -> Path:
    """The folder of a hub repository, from the cache where it is complete."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=DESCRIPTION + (WEIGHTS if weights else [])))
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        words = next(words for kind, words in HUB_ERRORS.items() if isinstance(error, kind))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name!r} {words.format(name=name, revision=revision, reason=reason)}") from error


def _read(name: str, label: str, path: Path, weights: bool) -> ModelSource:
    config = ModelConfig.from_dir(path)
    if weights:
        config, surprises = WeightFiles(path).settle(config)
        for sentence in surprises:
            log.warning("%s: %s", path, sentence)
    return ModelSource(name, label, path, config, end_ids(path, config.vocab_size))


def _tokenizer_end_id(path: Path) -> list[int]:
    """The id of the tokenizer's eos_token, read from its files: transformers takes seconds."""
    if not (path / "tokenizer_config.json").is_file():
        return []
    settings = Fields.read(path / "tokenizer_config.json")
    token = _content(settings.data.get("eos_token"))
    if token is None:
        return []
    for key, entry in settings.get("added_tokens_decoder", dict, {}).items():
        if _content(entry) == token and key.isdigit():
            return [int(key)]
    if not (path / "tokenizer.json").is_file():
        return []
    try:
        found = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id(token)
    except Exception as error:  # the library raises no other class
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    return [] if found is None else [found]


def _content(token: Any) -> str | None:
    """A token is spelled as a string or as an object with its content."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
