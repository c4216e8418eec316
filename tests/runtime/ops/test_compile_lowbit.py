"""Every kernel that multiplies weights of 8 and 4 bits compiled for `sm_90` as a 7B model's decode step launches it, without a
GPU: no spills, and the instructions that its speed or its safety rests on.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from models.random_weights import SHAPES
from models.scheme import Stored
from runtime.ops.fp8 import Fp8
from runtime.ops.lowbit import LowBit
from tests.runtime.ops.launches import Launch, played_step, writing_down
from tests.runtime.ops.sm90 import CUOBJDUMP, Compiled, compile_launch
from tests.runtime.ops.test_compile import CALLS, GEMVS, STEADY, barrier_before_counter, fits

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs the cuobjdump of Triton's Linux wheel")


@cache
def lowbit_step(model: str, batch: int, format: str, dtype: str = "bfloat16") -> list[Launch]:
    shape = replace(SHAPES[model], num_layers=1, dtype=dtype)
    return [each for each in played_step(shape, "fused", batch, format=format) if isinstance(each, Launch)]


LOWBIT_CALLS = pytest.mark.parametrize(
    ("model", "call"),
    [*(("llama-2-7b", call) for call in GEMVS[:4]), ("qwen2.5-7b", "norm_gate_up"), ("qwen2.5-7b", "down_proj")],
)


def lowbit_call(model: str, batch: int, format: str, call: str) -> tuple[Launch, Compiled]:
    """It fits, waits once, writes nothing before and reads its weights 16 bytes at a time."""
    launch = dict(zip(CALLS, lowbit_step(model, batch, format), strict=True))[call]
    compiled = compile_launch(launch)
    print(f"{launch.options}: {compiled.registers} registers, {compiled.shared_bytes} bytes of shared memory")
    fits(compiled)
    assert compiled.ptx.count("griddepcontrol.launch_dependents") == compiled.ptx.count("griddepcontrol.wait") == 1
    wait = compiled.first("griddepcontrol.wait")
    assert not [line for line in compiled.code[:wait] if line.startswith(("st.global", "atom", "red."))]
    if batch > 1:
        assert "wgmma.mma_async" in compiled.ptx
        if call == "norm_qkv_rope":  # whose parts attention adds
            assert compiled.first("atom") is None
        elif launch.arguments.get("SPLITS", 1) > 1:
            barrier_before_counter(compiled)
    return launch, compiled


@LOWBIT_CALLS
def test_a_batchs_products_with_4_bits_go_from_16_byte_loads_to_the_tensor_cores_by_pairs(model, call):
    launch, compiled = lowbit_call(model, 16, "int4", call)
    tiles = [read for read in compiled.reads if "tiles_ptr" in read.pointers]
    assert {read.bytes for read in tiles} == {16}
    early = set().union(*(read.pointers for read in compiled.reads if read.before_wait))
    assert early <= {"tiles_ptr", "scales_ptr", "norm_ptr"}
    assert "0x00f000f0" in compiled.ptx
    shape = launch.arguments
    asked = sum(read.bytes for read in tiles if read.before_wait) * 32 * launch.options["num_warps"]
    assert asked == (launch.options["num_stages"] - 1) * shape["BLOCKS"] * shape["COUNT"] // shape["HALVES"] * 1024
    assert {read.bytes for read in compiled.reads if "x_ptr" in read.pointers} == {16}
    assert "stmatrix.sync.aligned" in compiled.ptx  # x goes to shared memory in the operands' order by no more than a store


@LOWBIT_CALLS
def test_one_rows_products_with_4_bits_go_from_16_byte_loads_before_the_wait_to_the_tensor_cores_by_pairs(model, call):
    launch, compiled = lowbit_call(model, 1, "int4", call)
    weights = [read for read in compiled.reads if "weight_ptr" in read.pointers]
    assert {read.bytes for read in weights} == {16}
    assert all(read.evict_first for read in weights)
    shape, warps = launch.arguments, launch.options["num_warps"]
    steps = -(-shape["STRIDE"] // (256 * shape["K_WARPS"]))
    asked = sum(read.bytes for read in weights if read.before_wait) * 32 * warps
    assert asked == min(shape["AHEAD"], steps) * shape["PAIRS"] * 1024 * warps
    assert set().union(*(read.pointers for read in compiled.reads if read.before_wait)) <= STEADY
    assert {read.bytes for read in compiled.reads if "x_ptr" in read.pointers} == {16}
    assert compiled.ptx.count("mma.sync.aligned.m16n8k16") == 8 * (shape["PAIRS"] + 1) * steps
    assert "0x00f000f0" in compiled.ptx
    assert str(0x80088008 - 2**32) in compiled.ptx  # -8 of the smallest numbers: as a number it would be -0
    assert compiled.ptx.count("bar.sync") <= 7  # sums of several warps: x is loaded where the product wants it


@LOWBIT_CALLS
def test_one_rows_fp8_weights_come_in_16_byte_loads_before_the_wait_and_go_to_the_tensor_cores_by_masks_and_shifts(model, call):
    """Of pairs, without a conversion, a way through shared memory, or from lane to lane but for the sums."""
    launch, compiled = lowbit_call(model, 1, "fp8", call)
    weights = [read for read in compiled.reads if "weight_ptr" in read.pointers]
    assert {read.bytes for read in weights} == {16}
    assert all(read.evict_first for read in weights)
    shape, warps = launch.arguments, launch.options["num_warps"]
    steps = -(-shape["STRIDE"] // (256 * shape["K_WARPS"]))
    asked = sum(read.bytes for read in weights if read.before_wait) * 32 * warps
    assert asked == min(shape["AHEAD"], steps) * shape["PAIRS"] * 1024 * warps
    assert set().union(*(read.pointers for read in compiled.reads if read.before_wait)) <= STEADY
    assert {read.bytes for read in compiled.reads if "x_ptr" in read.pointers} == {16}
    assert compiled.ptx.count("mma.sync.aligned.m16n8k16") == 4 * shape["PAIRS"] * steps
    assert "0x07f007f0" in compiled.ptx
    assert "e4m3" not in compiled.ptx
    assert compiled.ptx.count("bar.sync") <= 5  # sums of several warps
    assert compiled.ptx.count("shfl.sync") < 24 + 16 * shape["PAIRS"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@LOWBIT_CALLS
def test_a_batchs_fp8_weights_go_from_memory_to_the_tensor_cores_and_through_registers_only_for_float16(model, call, dtype):
    if dtype == "float16" and model != "llama-2-7b":
        pytest.skip("one model is enough")
    launch = dict(zip(CALLS, lowbit_step(model, 16, "fp8", dtype), strict=True))[call]
    compiled = compile_launch(launch)
    print(f"{launch.options}: {compiled.registers} registers, {compiled.shared_bytes} bytes of shared memory")
    fits(compiled)
    weights = [read for read in compiled.reads if "weight_ptr" in read.pointers]
    assert {read.bytes for read in weights} == {16 if dtype == "bfloat16" else 8}
    products = [line for line in compiled.code if line.startswith("wgmma.mma_async")]
    assert products
    if dtype == "bfloat16":
        # The first operand is a descriptor of shared memory, not a list of registers.
        assert all(re.search(r"\.m64n32k32\.f32\.e4m3\.e4m3 \{[^}]*\}, %rd\d+, %rd\d+,", line) for line in products)
        asked = sum(read.bytes for read in weights if read.before_wait) * 32 * launch.options["num_warps"]
        slice_bytes = launch.arguments["ROWS"] * launch.arguments["K_SLICE"] * (2 if call == "norm_gate_up" else 1)
        assert asked == (launch.options["num_stages"] - 1) * slice_bytes
    else:
        assert all(".f32.f16.f16 " in line for line in products)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("call", GEMVS[:4])
def test_fp8_weights_with_scales_for_blocks_spill_nothing(batch, call):
    shape = replace(SHAPES["llama-3.1-8b"], num_layers=1)
    played = played_step(shape, "fused", batch, format="fp8", stored=Stored("fp8", 128))
    launch = dict(zip(CALLS, [each for each in played if isinstance(each, Launch)], strict=True))[call]
    assert launch.arguments["GROUP"] == 128
    fits(compile_launch(launch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("format", "group", "zeros"), [("fp8", 0, False), ("fp8", 128, False), ("int4", 32, False), ("int4", 128, True)]
)
def test_weights_of_8_and_4_bits_become_a_matrix_by_a_launch_that_compiles(format, group, zeros, dtype):
    """A constant that was named in a loop did not, in Triton 3.6."""
    shape, scratch = (11008, 4096), torch.empty(0, dtype=dtype, device="meta")
    weight = Fp8.empty(shape, group, scratch) if format == "fp8" else LowBit.empty(shape, group, scratch, torch.float16, zeros)
    with writing_down() as told:
        weight.dense_into(torch.empty(shape, dtype=dtype, device="meta"))
    (launch,) = (each for each in told if isinstance(each, Launch))
    fits(compile_launch(launch))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("stored", [Stored("awq", 128, True), Stored("packed", 64), Stored("gptq", 32, True, 1)], ids=str)
def test_stored_groups_and_zeros_of_4_bits_compile_and_spill_nothing(stored, batch):
    played = played_step(replace(SHAPES["llama-3.1-8b"], num_layers=1), "fused", batch, format="int4", stored=stored)
    products = [each for each in played if isinstance(each, Launch) and each.arguments.get("scales_ptr") is not None]
    assert len(products) == 4
    for launch in products:
        fits(compile_launch(launch))
