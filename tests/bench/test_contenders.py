"""The rung that only a bench has: our GEMV kernels with nothing fused, launched as often as the unfused ones."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from bench.contenders import BARE, NO_PDL, BareOps, bare, without_pdl
from models import find_model, load_engine
from models.random_weights import SHAPES
from runtime.config import EngineConfig
from runtime.ops import load_ops
from tests.runtime.ops.launches import Launch, played_step


@pytest.mark.parametrize("model", ["llama-2-7b", "qwen2.5-7b", "qwen3-8b"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_bare_layer_has_the_unfused_launches_and_no_gemm_of_cublas(model, batch):
    shape = replace(SHAPES[model], num_layers=2)
    with patch("tests.runtime.ops.launches.load_ops", lambda ops, pdl: BareOps()):
        played = played_step(shape, "bare", batch)
    unfused = played_step(shape, "unfused", batch)
    names = [each.name if isinstance(each, Launch) else each for each in played]
    assert len(names) == len(unfused)
    assert sum("proj_residual" in name for name in names) == 2 * 7 + 1
    assert not any("mm" in name or "linear" in name for name in names if name.startswith("aten"))
    assert not any(each.arguments.get("PDL") for each in played if isinstance(each, Launch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_bare_step_gives_the_unfused_logits(batch, tmp_path):
    from bench.steps import WholeSteps
    from tests.checkpoints import tiny

    config = EngineConfig(max_slots=batch, max_len=4200, graph="off")
    source = find_model(str(tiny(tmp_path, "llama")), random_weights=True)
    loaded = load_engine(source, config, needed_len=64, prepare=False)
    steps = WholeSteps(loaded, batch, 32)
    found = []
    for ops in (BareOps(), load_ops("unfused")):
        play = steps.eager(ops)
        steps.reset()
        found.append(play().clone())
    assert float((found[0] - found[1]).abs().max()) <= 0.02 * float(found[1].abs().max())
    runs = bare(loaded.engine), without_pdl(loaded.engine)
    assert [(run.ops, run.graph) for run in runs] == [(BARE, "on"), (NO_PDL, "on")]
    assert set(loaded.engine.modes.steps) >= {BARE, NO_PDL}
