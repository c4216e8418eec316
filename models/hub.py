"""Owns fetching a model from the Hugging Face hub, through its cache. Does not own what is in the folder."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from runtime.errors import CheckpointError

DESCRIPTION = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
"""Not every *.safetensors: some repositories hold the same weights once more in another layout."""


def fetch(repository: str, revision: str | None, weights: bool) -> Path:
    """The folder of a hub repository, from the cache where it is complete.

    Args:
        repository: "owner/name".
        revision: branch, tag or commit; None is the default branch.
        weights: whether the weights are wanted too.

    Raises:
        CheckpointError: it does not exist, asks for a login, or cannot be reached; one sentence with the remedy.
    """
    patterns = DESCRIPTION + (WEIGHTS if weights else [])
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise CheckpointError(f"{repository!r} is neither a folder here nor a Hugging Face hub id") from error
    except GatedRepoError as error:
        page = f"https://huggingface.co/{repository}"
        raise CheckpointError(f"{repository} is gated: accept its terms on {page}, then run `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repository} is neither a folder here nor a public repository on the Hugging Face hub; "
            "check the spelling, or run `hf auth login` if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repository} is not in the Hugging Face cache and the hub cannot be reached; "
            f"run `hf download {repository}` on a machine that is online, or give a local folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{repository} cannot be fetched from the Hugging Face hub: {reason}") from error
