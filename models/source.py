"""Owns finding a model: what MODEL names, the fetch from the Hugging Face hub, which ids end an answer. Loads no weights."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import errors, parse_safetensors_file_metadata, snapshot_download
from tokenizers import Tokenizer

from models.config import QUANTIZED_BY, ModelConfig
from models.demo import demo_folder
from models.fields import Fields, one_line
from models.gguf import open_gguf
from models.random_weights import PREFIX, SEED, SHAPES
from models.stored import INDEX, Entry, file_names, open_file
from models.tokenizer import FILES
from models.weights import WeightFiles
from runtime.errors import CheckpointError, ConfigError, QuartetError
from runtime.request import MAX_END_IDS

log = logging.getLogger(__name__)

DESCRIPTION = ["config.json", "generation_config.json", "adapter_config.json", *QUANTIZED_BY, INDEX, "tokenizer*"]
DESCRIPTION += ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*"]
DESCRIPTION += ["additional_chat_templates/*"]
"""What is fetched before the weights, which are those the index names: some repositories hold them twice."""

OFFLINE = "is not in the Hugging Face cache and the hub cannot be reached; run `hf download {name}` on a machine that is online"
HUB_ERRORS: dict[type[Exception], str] = {
    errors.HFValidationError: "is neither a folder here nor a Hugging Face hub id",
    errors.GatedRepoError: "is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`",
    errors.RevisionNotFoundError: "has no revision {revision!r}",
    errors.RepositoryNotFoundError: "is neither a folder here nor a public model on the Hugging Face hub; check the spelling, "
    "or run `hf auth login` if it is private",
    errors.OfflineModeIsEnabled: OFFLINE + " and without HF_HUB_OFFLINE, or give a local folder",
    errors.LocalEntryNotFoundError: OFFLINE + ", or give a local folder",
    errors.EntryNotFoundError: "lacks a file of weights ({reason}); Quartet reads safetensors",
    Exception: "cannot be fetched from the Hugging Face hub: {reason}",
}
"""What to say after the model's name, by the first class that fits."""

MOST = {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0}
"""What is taken from generation_config.json, and the most it may be; the least is 0."""


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found and checked, not loaded.

    Attributes:
        name: as typed.
        label: short name for outputs, and the one a server answers to.
        path: its folder or .gguf file; None: the weights are random.
        config: with the dtype and the tying that the weight files show.
        end_ids: ids that end an answer.
        sampling: what generation_config.json asks for, by the names of SamplingParams: a server's defaults.
        note: what every output must say of it, or None.
    """

    name: str
    label: str
    path: Path | None
    config: ModelConfig
    end_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder, which transformers can read too; None where there is none."""
        return self.path if self.path is not None and self.path.is_dir() else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer; a .gguf file holds its own."""
        return self.path is not None and (self.path.is_file() or any((self.path / name).is_file() for name in FILES))

    def with_random_weights(self) -> "ModelSource":
        """The same shapes with random weights, no tokenizer and no limit of positions."""
        config = replace(self.config, max_position=None)
        return replace(self, path=None, config=config, end_ids=(), sampling={}, note=f"random weights, seed {SEED}")


def find_model(
    name: str, revision: str | None = None, weights: bool = True, fetch: bool = True, random_weights: bool = False
) -> ModelSource:
    """What MODEL names: `demo`, `random:<shape>`, a local folder, a .gguf file, or a Hugging Face hub id.

    Args:
        revision: branch, tag or commit of a hub id.
        weights: whether the weight files must be there; False fetches and checks the config alone.
        fetch: False checks the headers of a hub id's weight files where they lie, without fetching them.
        random_weights: the model's shapes with random weights; its own need not be there.

    Raises:
        CheckpointError: nothing of that name, or its files are missing, damaged or contradict each other.
        UnsupportedModelError: a model that Quartet does not run.
        ConfigError: a revision of something that has none.
    """
    if random_weights:
        return find_model(name, revision, weights=False).with_random_weights()
    try:
        folder = Path(name).expanduser()
        folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user, a null character
        raise CheckpointError(f"MODEL {name[:80]!r} cannot be a path: {error.__class__.__name__}; give another name") from None
    made = name.startswith(PREFIX)
    if revision is not None and (made or name == "demo" or folder.exists()):
        raise ConfigError(f"--revision names a version on the Hugging Face hub and {name} is not from there; leave it out")
    if made:
        shape = SHAPES.get(name.removeprefix(PREFIX))
        if shape is None:
            raise CheckpointError(f"{name} is unknown; random models: {', '.join(SHAPES)}")
        return ModelSource(name, name, None, shape).with_random_weights()
    if name == "demo":
        source = _read(name, "demo", demo_folder(), weights)
        return replace(source, note="demo model: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) widened to bfloat16")
    if name and folder.is_dir():
        return _read(name, folder.resolve().name, folder, weights)
    if name and folder.is_file() and folder.suffix == ".gguf":
        return _read_gguf(name, folder)
    if name and folder.exists():
        raise CheckpointError(f"{name} is a file; give the folder that holds config.json and the weights, or a .gguf file")
    local = name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1
    if not name or local or get_close_matches(name, ["demo"], cutoff=0.7):
        guess = "; did you mean demo?" if get_close_matches(name, ["demo"], cutoff=0.7) else ""
        raise CheckpointError(
            f"{name!r} is no folder or file; give `demo`, a local folder or .gguf file, a hub id or `random:<shape>`{guess}"
        )
    return _from_hub(name, revision, weights, fetch)


def end_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: the union of what config.json, generation_config.json and the tokenizer name, in that order."""
    files = [file for file in (path / "config.json", path / "generation_config.json") if file.is_file()]
    found = [token for file in files for token in Fields.read(file).token_ids("eos_token_id")] + _tokenizer_end_id(path)
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        log.warning("%s: end ids %s are outside the vocabulary of %d and are left out", path, outside, vocab_size)
    kept = [token for token in dict.fromkeys(found) if token not in outside]
    if len(kept) > MAX_END_IDS:
        log.warning("%s: of %d end ids the first %d end an answer", path, len(kept), MAX_END_IDS)
    return tuple(kept[:MAX_END_IDS])


def sampling_defaults(path: Path) -> dict[str, Any]:
    """What generation_config.json asks for among MOST, unless its do_sample is false. Penalties in a file are never taken."""
    if not (path / "generation_config.json").is_file():
        return {}
    data = Fields.read(path / "generation_config.json").data
    if data.get("do_sample") is False:
        return {}
    found = {}
    for name, most in MOST.items():
        value: Any = data.get(name)
        if type(value) in (int, type(most)) and 0 <= value <= most:
            found[name] = type(most)(value)
        elif value is not None:
            log.warning("%s: generation_config.json has %s %.40r and is not followed in it", path, name, value)
    return found


def _from_hub(name: str, revision: str | None, weights: bool, fetch: bool) -> ModelSource:
    """A hub repository: its description, which may refuse it, and then the weights, from the cache where they are there."""

    def header(file: Path) -> dict[str, Entry]:
        if file.exists():
            return open_file(file)
        found = parse_safetensors_file_metadata(name, file.relative_to(path).as_posix(), revision=revision)
        return {key: Entry(file.name, tuple(info.shape), info.dtype) for key, info in found.tensors.items()}

    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=DESCRIPTION))
        ModelConfig.from_dir(path)
        if not weights or not fetch:
            return _read(name, name, path, weights, header)
        path = Path(snapshot_download(name, revision=revision, allow_patterns=[*DESCRIPTION, *file_names(path)]))
    except QuartetError:
        raise
    except Exception as error:  # the hub's client has changed its HTTP library, and with it what it raises, more than once
        words = next(words for kind, words in HUB_ERRORS.items() if isinstance(error, kind))
        raise CheckpointError(f"{name!r} {words.format(name=name, revision=revision, reason=one_line(error))}") from error
    return _read(name, name, path)


def _read(
    name: str, label: str, path: Path, weights: bool = True, opened: Callable[[Path], dict[str, Entry]] = open_file
) -> ModelSource:
    """A folder; `opened` says what its weight files hold, as in `WeightFiles.of_folder`."""
    config = ModelConfig.from_dir(path)  # a kind that is not run is refused before its files are looked for
    if weights:
        config, surprises = WeightFiles.of_folder(path, opened).settle(config)
        for sentence in surprises:
            log.warning("%s: %s", path, sentence)
    return ModelSource(name, label, path, config, end_ids(path, config.vocab_size), sampling_defaults(path))


def _read_gguf(name: str, path: Path) -> ModelSource:
    gguf = open_gguf(path)
    config, _ = gguf.weights().settle(gguf.config)
    note = f"GGUF: {', '.join(gguf.quantized)} widened to {config.dtype}" if gguf.quantized else None
    ends = tuple(token for token in dict.fromkeys(gguf.end_ids) if 0 <= token < config.vocab_size)
    return ModelSource(name, path.stem, path, config, ends, note=note)


def _tokenizer_end_id(path: Path) -> list[int]:
    """The id of the tokenizer's eos_token, read from its files: transformers takes seconds."""
    if not (path / "tokenizer_config.json").is_file():
        return []
    settings = Fields.read(path / "tokenizer_config.json")
    token = _content(settings.data.get("eos_token"))
    if token is None:
        return []
    for key, entry in settings.get("added_tokens_decoder", dict, {}).items():
        if _content(entry) == token and key.isdecimal() and len(key) < 10:
            return [int(key)]
    if not (path / "tokenizer.json").is_file():
        return []
    try:
        found = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id(token)
    except Exception as error:  # the library raises no other class
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {one_line(error)}") from error
    return [] if found is None else [found]


def _content(token: Any) -> str | None:
    """A token is spelled as a string or as an object with its content."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
