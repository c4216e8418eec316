"""The bench's Triton kernels compiled for `sm_90` at full size, without a GPU: none spills but the one that is meant to."""

import pytest

pytest.importorskip("triton", reason="needs Triton")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import experiments
from bench.ceiling import read_kernel
from bench.launches import _tiny_kernel
from tests.runtime.ops.launches import CUDA, Launch, writing_down
from tests.runtime.ops.sm90 import CUOBJDUMP, MAX_SHARED_BYTES, compile_launch

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs the cuobjdump of Triton's Linux wheel")


def compiled(play):
    """Of each different launch that `play` makes on fake CUDA tensors: its name and what it compiles to."""
    with FakeTensorMode(), writing_down() as told:
        play()
    return [(launch.name, compile_launch(launch)) for launch in told if isinstance(launch, Launch)]


@pytest.mark.parametrize("name", ["chain", "rows", "gemm", "attention"])
def test_an_experiments_kernels_fit_the_registers(name):
    def play():
        for variant in (each for experiment in experiments.by_name()[name] for each in experiment.variants):
            if variant.name.startswith("Triton"):
                variant.make(CUDA)()

    for kernel, found in compiled(play):
        print(f"{kernel}: {found.registers} registers, {found.shared_bytes} bytes of shared memory")
        assert (found.stack_bytes, found.local_bytes) == (0, 0)
        assert found.shared_bytes <= MAX_SHARED_BYTES


def test_the_chain_that_is_meant_to_spill_does():
    few, many = experiments.spill(1 << 25, 64, 16).variants
    ((_, fits),), ((_, spills),) = compiled(lambda: few.make(CUDA)()), compiled(lambda: many.make(CUDA)())
    print(f"{fits.registers} registers and {fits.stack_bytes} bytes of stack; {spills.registers} and {spills.stack_bytes}")
    assert fits.stack_bytes == 0
    assert spills.stack_bytes > 0


@pytest.mark.parametrize("pdl", [True, False])
def test_a_boundarys_kernels_wait_once_each_with_pdl_and_never_without(pdl):
    """A chain by programmatic dependent launch has an order only if every kernel of it waits."""

    def play():
        x, out = (torch.empty(size, device=CUDA) for size in (1 << 23, 1 << 10))
        read_kernel[(1024,)](x, out, BLOCK=4096, ITERATIONS=2, STAGES=2, PDL=pdl, num_warps=4, launch_pdl=pdl)
        _tiny_kernel[(1,)](out, PDL=pdl, num_warps=1, launch_pdl=pdl)

    for _, found in compiled(play):
        assert sum(line.startswith("griddepcontrol.wait") for line in found.code) == pdl
        assert sum(line.startswith("griddepcontrol.launch_dependents") for line in found.code) == pdl
        assert found.stack_bytes == 0
