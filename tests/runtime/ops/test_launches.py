"""How often a decode step sets the GPU to work: counted on a step played without one, and by the profiler on a real one."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from models.config import ModelConfig
from runtime.ops.threshold import passes
from tests.checkpoints import tiny, tok_b
from tests.runtime.ops.launches import Launch, played_step

LAYERS = 3
TINY = ModelConfig("llama", 512, 256, 344, LAYERS, 8, 2, 32, 512)
WIDER = replace(TINY, intermediate_size=384)  # which groups of 128 divide
LAYER = ["norm_linear", "attention", "proj_residual", "norm_gate_up", "proj_residual"]


def names(operations):
    """What each operation is, without the variants for batches and for attention's tiles."""
    variants = ("_kernel", "_token", "_lowbit", "_batch", "_head", "_group")
    found = []
    for operation in operations:
        name = operation.name if isinstance(operation, Launch) else operation
        for variant in variants:
            name = name.replace(variant, "")
        found.append(name.removeprefix("_"))
    return found


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_a_fused_layer_is_five_launches_of_four_kernels_and_nothing_else(batch, format):
    step = names(played_step(TINY if format == "bf16" else WIDER, "fused", batch, format=format))
    assert step == ["embed", *LAYER * LAYERS, "norm_linear", "sampler"]
    assert len(set(LAYER)) == 4


def test_a_full_draw_is_launches_alone_and_as_many_whatever_the_batch():
    plain = names(played_step(TINY, "fused", 1))
    for batch in (1, 16):
        step = names(played_step(TINY, "fused", batch, draw="full"))
        assert step == [*plain[:-1], "adjust", *["narrow"] * passes(TINY.vocab_size), "pick", "tell"]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("shape", "operations"),
    [
        (TINY, 15),
        (replace(TINY, family="qwen2", qkv_bias=True), 15),
        (replace(TINY, family="qwen3", qk_norm=True), 17),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_an_unfused_layer_is_fifteen_operations_and_two_more_for_per_head_norms(shape, operations, batch):
    step = played_step(shape, "unfused", batch)
    assert names(step)[0] == "embed"
    assert names(step)[-3:] == ["aten.rms_norm", "aten.mm", "sampler"]
    layers = names(step[1:-3])
    assert layers == layers[:operations] * LAYERS
    assert {"rope", "cache_write", "attention", "silu_mul"} < set(layers)


@pytest.mark.parametrize("batch", [1, 16])
def test_the_embedding_and_the_launch_after_it_alone_go_without_the_pdl_attribute(batch):
    """Kernels read the rows' slots and positions before their wait: those must be written by a kernel that has ended, and no
    kernel of the step before may still run beside this step's."""
    launches = played_step(TINY, "fused", batch)
    assert [launch.options.get("launch_pdl", False) for launch in launches] == [False, False] + [True] * (len(launches) - 2)
    assert all(launch.arguments["PDL"] for launch in launches[1:])  # the launch after the embedding lets its successor start
    launches = played_step(TINY, "fused", batch, pdl=False)
    assert not any(launch.options.get("launch_pdl") or launch.arguments.get("PDL") for launch in launches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_sees_five_kernels_a_fused_layer_and_fifteen_an_unfused_one(tmp_path):
    """cuBLAS's workspace must be off before torch starts (the doors see to it), or it adds kernels that split K."""
    folder = tok_b(tiny(tmp_path / "model", num_hidden_layers=4))
    words = ["latency", "--model", folder, "--ops", "fused,unfused", "--graph", "on,off", "--batch", "1,16", "-o", "json"]
    words += ["--prompt-len", 16, "--gen-len", 16, "--reps", 1]
    command = [sys.executable, "-m", "bench", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    cells = json.loads(done.stdout.splitlines()[-1])["cells"]
    assert len(cells) == 8
    for cell in cells:
        where = f"{cell['ops']}, graph {cell['graph']}, batch {cell['batch']}"
        assert cell["profile"], f"{where}: {cell['profile_note']}"
        counted, names = cell["profile"]["kernels_per_layer"], cell["profile"]["kernel_names"]
        assert counted == {"fused": 5, "unfused": 15}[cell["ops"]], f"{where}: {names}"
        if cell["ops"] == "fused":  # down has a width here that one row does not take to tensor cores
            places = {re.sub("_(token|batch)_kernel$", "_kernel", name) for name, times in names.items() if times >= 4}
            assert len(places) == 4, f"{where}: {names}"
