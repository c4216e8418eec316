"""Owns one question: does the host hold the serving loop up? `python -m bench.loop MODEL` plays 200 steps of the engine's loop
and then, from the same state, 200 replays of its graph back to back. Does not own the latency matrix (latency).
"""

import gc
import sys
import time
from functools import partial
from statistics import median

import torch

from bench.contenders import random_ids
from bench.steps import back_to_back_us
from models import find_model, load_engine
from runtime.__main__ import run_door
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import ConfigError
from runtime.request import Request

STEPS = 200
CONTEXT = 512
BATCHES = (1, 8, 16)
REPS = 3


def compare(engine: Engine, batch: int) -> tuple[float, float]:
    """Milliseconds of a step in the loop, and of a replay, at the same positions; means over 200."""
    ids = random_ids(engine.model.vocab_size, batch, CONTEXT, seed=0)
    for i, prompt in enumerate(ids):
        engine.submit(Request(str(i), tuple(prompt)))
    while len(engine.step()) < batch:  # until all decode
        pass
    torch.cuda.synchronize()
    engine.step()  # the pipe is full again
    before = engine.state.packed.clone()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    loop = time.perf_counter() - start
    engine.state.packed.copy_(before)
    replay_us = back_to_back_us(lambda: engine.modes.play(batch, "plain"), STEPS, engine.model.device)
    for i in range(batch):
        engine.cancel(str(i))
    while engine.has_work:
        engine.step()
    return 1e3 * loop / STEPS, replay_us / 1e3


def main(name: str) -> None:
    """Print both for each batch size, medians over reps."""
    if not torch.cuda.is_available():
        raise ConfigError("graphs need a CUDA device and torch finds none")
    config = EngineConfig("cuda", graph="on", max_slots=max(BATCHES), prefix_reuse=False)
    engine = load_engine(find_model(name), config, needed_len=CONTEXT + 3 * STEPS).engine
    gc.collect()
    gc.freeze()
    for batch in BATCHES:
        loop, replay = (median(each) for each in zip(*(compare(engine, batch) for _ in range(REPS)), strict=True))
        print(f"batch {batch}: loop {loop:.4f} ms a step, replays {replay:.4f} ms, {100 * (loop / replay - 1):+.2f} %")


if __name__ == "__main__":
    run_door(partial(main, sys.argv[1] if len(sys.argv) > 1 else "demo"))
