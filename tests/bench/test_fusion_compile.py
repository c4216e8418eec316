"""The bench's Triton kernels compiled for `sm_90` at full size, without a GPU: none spills but the one that is meant to."""

import pytest

pytest.importorskip("triton", reason="needs Triton")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import chains, experiments
from bench.fusion_kernels import WIDE_AN_SM, WIDE_WARPS
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


def test_a_wider_rows_blocks_are_at_least_as_many_an_sm_as_the_prediction_takes():
    for experiment in (each for each in experiments.by_name()["rows"] if "131072" in each.title):
        ((_, found),) = compiled(lambda made=experiment.variants[-1].make: made(CUDA)())
        assert 65536 // (found.registers * 32 * WIDE_WARPS) >= WIDE_AN_SM


@pytest.mark.parametrize("pdl", [True, False])
def test_a_chains_kernels_wait_once_each_with_pdl_and_never_without(pdl):
    """A chain by programmatic dependent launch has an order only if every kernel of it waits."""
    options = {"PDL": pdl, "launch_pdl": pdl}

    def play():
        weights = torch.empty(chains.SIZES[1] // 2, dtype=torch.bfloat16, device=CUDA)
        for name, link, _ in chains._links(CUDA, has_pdl=False):
            if name != "library":
                link(weights, 0, options)
        _tiny_kernel[(1,)](weights, num_warps=1, **options)

    found = compiled(play)
    assert [name for name, _ in found] == ["stream_kernel", "dots_kernel", "_tiny_kernel"]
    for _, each in found:
        assert sum(line.startswith("griddepcontrol.wait") for line in each.code) == pdl
        assert sum(line.startswith("griddepcontrol.launch_dependents") for line in each.code) == pdl
        assert each.stack_bytes == 0
    assert 2 * found[1][1].shared_bytes <= MAX_SHARED_BYTES  # two programs an SM
    assert any("wgmma" in line for line in found[1][1].code)


def test_blocks_that_meet_leave_their_sums_before_they_say_so():
    """In Triton 3.6 the atomic could overtake other warps' stores."""

    def play():
        values, counter = torch.empty(1 << 18, device=CUDA), torch.empty(64, dtype=torch.int32, device=CUDA)
        chains.meeting_kernel[(256,)](values, counter, values, VALUES=1024, PARTS=4, num_warps=4)

    ((_, found),) = compiled(play)
    stored = found.first("st.global")
    barrier = found.first("bar.sync", stored)
    assert barrier < found.first("atom", barrier)
