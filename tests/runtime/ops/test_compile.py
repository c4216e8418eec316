"""Every kernel compiled for `sm_90` at 7B shapes, without a GPU: no spills, and the instructions that it rests on."""

import pytest

pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl

from runtime.ops.attention import BLOCK, MIN_BLOCKS, _attention_kernel
from runtime.ops.cache_write import _cache_write_kernel
from runtime.ops.rope import _rope_kernel
from runtime.ops.silu_mul import _silu_mul_kernel
from tests.runtime.ops.sm90 import CUOBJDUMP, compile_kernel

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs the cuobjdump of Triton's Linux wheel")

ATTENTION = dict(
    dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("slots_ptr", "positions_ptr", "counter_ptr"), "*i32"),
    **dict.fromkeys(("partial_ptr", "stats_ptr"), "*fp32"),
    stride_slot="i64",
    stride_head="i64",
    scale="fp32",
)


def check(compiled):
    print(f"{compiled.registers} registers")
    assert compiled.stack_bytes == 0
    assert compiled.local_bytes == 0


@pytest.mark.parametrize(("kv_heads", "group", "window"), [(32, 1, 0), (8, 4, 4096), (4, 7, 0), (8, 4, 0)])
def test_attention_at_7b_shapes(kv_heads, group, window):
    constants = dict(
        WINDOW=window, K=kv_heads, GROUP=group, GROUP_PAD=16, D=128, D_PAD=128, BLOCK=BLOCK, SPLITS=8, MIN_BLOCKS=MIN_BLOCKS
    )
    compiled = compile_kernel(_attention_kernel, ATTENTION, {**constants, "DOT_DTYPE": tl.bfloat16}, num_warps=4)
    check(compiled)
    assert "mma" in compiled.ptx
    assert "ld.global.v4" in compiled.ptx or "cp.async.cg.shared.global" in compiled.ptx  # 16-byte reads of K and V
    # Partials must be visible before the counter says so: a barrier stands between the stores and the atomic.
    lines = compiled.ptx.splitlines()
    atom = next(i for i, line in enumerate(lines) if "atom" in line and "add" in line)
    last_store = max(i for i, line in enumerate(lines[:atom]) if "st.global" in line)
    assert any("bar.sync" in line for line in lines[last_store:atom])


def test_rope_cache_write_and_silu_mul():
    pointers = dict.fromkeys(("q_ptr", "k_ptr"), "*bf16") | dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    check(compile_kernel(_rope_kernel, {**pointers, "positions_ptr": "*i32"}, dict(H=32, K=8, D=128, HALF_PAD=64), num_warps=1))
    pointers = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16") | dict.fromkeys(
        ("slots_ptr", "positions_ptr"), "*i32"
    )
    strides = {"stride_slot": "i64", "stride_head": "i64"}
    check(compile_kernel(_cache_write_kernel, {**pointers, **strides}, dict(K=8, D=128, D_PAD=128), num_warps=1))
    pointers = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16")
    check(compile_kernel(_silu_mul_kernel, {**pointers, "n": "i32"}, dict(BLOCK=1024), num_warps=4))
