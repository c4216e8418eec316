"""Owns start costs: seconds from a process's start to ready, with an empty Triton cache and again with the one that it left.

Does not own what is done in them (models.load, Engine.prepare).
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

import psutil

from models import load_engine
from runtime.config import EngineConfig

SECONDS = 300


def start_costs(model: str, revision: str | None, random_weights: bool, config: EngineConfig) -> dict[str, Any]:
    """For "cold" and "warm": ready_seconds from spawning a process, of which load, compile and capture; or what went wrong.

    Weights read from disk come from the page cache both times where this process has just read them.
    """
    asked = (model, revision, random_weights, asdict(config))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            # `env` sets the variable: only doors read the environment here.
            command = [
                "env",
                f"TRITON_CACHE_DIR={folder}",
                sys.executable,
                "-c",
                f"from bench.start import ready; ready(*{asked!r})",
            ]
            start = time.perf_counter()
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
                found[name] = json.loads(done.stdout.splitlines()[-1]) | {"process_seconds": time.perf_counter() - start}
            except subprocess.TimeoutExpired:
                found[name] = {"error": f"not ready after {SECONDS} s"}
            except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
                said = getattr(error, "stderr", None) or str(error)
                found[name] = {"error": said.strip().splitlines()[-1]}
    return found


def ready(model: str, revision: str | None, random_weights: bool, config: dict[str, Any]) -> None:
    """Start as a door does and print the seconds; for the process that `start_costs` spawns."""
    spawned = psutil.Process().create_time()
    loaded = load_engine(model, EngineConfig(**config), revision, random_weights, progress=False, prepare=False)
    prepared = loaded.engine.prepare()
    print(
        json.dumps({"ready_seconds": time.time() - spawned, "load_seconds": loaded.load_seconds, **asdict(prepared)}),
        flush=True,
    )
