"""Every kernel of both ops sets with dense weights, and the samplers, compiled for `sm_90` as a 7B model's decode step launches
them, without a GPU: no spills, and the instructions that their speed or their safety rests on.
"""

import re
from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton", reason="needs Triton")

from models.random_weights import SHAPES
from tests.runtime.ops.launches import Launch, played_step
from tests.runtime.ops.sm90 import CUOBJDUMP, MAX_SHARED_BYTES, Compiled, compile_launch

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs the cuobjdump of Triton's Linux wheel")

MODELS = ("llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b")
WINDOWED = "mistral-7b-v0.1"
CALLS = ("embed", "norm_qkv_rope", "attention", "o_proj", "norm_gate_up", "down_proj", "norm_lm_head", "sample")
GEMVS = ("norm_qkv_rope", "o_proj", "norm_gate_up", "down_proj", "norm_lm_head")

STEADY = {"norm_ptr", "weight_ptr", "bias_ptr", "scales_ptr", "slots_ptr", "positions_ptr", "k_ptr", "v_ptr"} | {
    "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr", "temperature_ptr", "seed_ptr", "choice_ptr"
}  # fmt: skip
"""What no kernel writes while the one before it may still run. Of the cache that holds for earlier positions."""


@cache
def step(model: str, ops: str, batch: int) -> list[Launch]:
    return [each for each in played_step(replace(SHAPES[model], num_layers=1), ops, batch) if isinstance(each, Launch)]


def fused(model: str, batch: int, call: str) -> tuple[Launch, Compiled]:
    launch = dict(zip(CALLS, step(model, "fused", batch), strict=True))[call]
    compiled = compile_launch(launch)
    assert f".entry {launch.name}(" in compiled.ptx
    print(f"{launch.name} {launch.options}: {compiled.registers} registers, {compiled.shared_bytes} bytes of shared memory")
    return launch, compiled


def over(models=MODELS, batches=(1, 16), calls=CALLS):
    return pytest.mark.parametrize(
        ("model", "batch", "call"), [(model, batch, call) for model in models for batch in batches for call in calls]
    )


def fits(compiled: Compiled) -> None:
    assert (compiled.stack_bytes, compiled.local_bytes) == (0, 0)
    assert compiled.shared_bytes <= MAX_SHARED_BYTES


def barrier_before_counter(compiled: Compiled) -> None:
    """Partial results must be visible before the counter says so. In Triton 3.6 the atomic can overtake other warps' stores:
    only a barrier between the last store and the atomic holds it back."""
    atomic = compiled.first("atom")
    assert atomic is not None
    last_store = max(i for i in range(atomic) if compiled.code[i].startswith("st.global"))
    assert compiled.first("bar.sync", last_store) < atomic


@over()
def test_no_fused_kernel_spills(model, batch, call):
    fits(fused(model, batch, call)[1])


@pytest.mark.parametrize("model", MODELS)
def test_one_rows_products_spill_nothing_without_pdl_either(model):
    """Their registers are limited to what they take with PDL."""
    played = played_step(replace(SHAPES[model], num_layers=1), "fused", 1, pdl=False)
    products = [each for each in played if isinstance(each, Launch) and each.name.endswith("_token_kernel")]
    assert len(products) == len(GEMVS)
    for launch in products:
        assert not launch.arguments["PDL"]
        fits(compile_launch(launch))


@over(batches=(1,), calls=GEMVS)
def test_one_rows_weights_go_from_memory_to_the_tensor_cores_without_a_detour(model, batch, call):
    """Triton would otherwise pass what it loads through shared memory, or from lane to lane, into an operand's order."""
    launch, compiled = fused(model, batch, call)
    shape = launch.arguments
    warps, steps = shape["ROW_WARPS"] * shape["K_WARPS"], shape["IN"] // (256 * shape["K_WARPS"])
    assert compiled.ptx.count("mma.sync.aligned.m16n8k16") == 2 * shape["PAIRS"] * steps
    assert compiled.ptx.count("bar.sync") <= 4 + 2 * shape["PAIRS"]  # sums of several warps
    assert compiled.ptx.count("shfl.sync") < 24 + 16 * shape["PAIRS"]
    assert warps == launch.options["num_warps"]


@pytest.mark.parametrize("ops", ["fused", "unfused"])
def test_attention_in_float32_spills_nothing_either(ops):
    """Tiles made for 2-byte types put 8 kB a thread into memory."""
    played = played_step(replace(SHAPES["llama-2-7b"], num_layers=1, dtype="float32"), ops, 16)
    fits(compile_launch(next(each for each in played if isinstance(each, Launch) and each.name == "_attention_kernel")))


@over()
def test_every_fused_kernel_but_embed_lets_the_next_one_start_and_waits_once(model, batch, call):
    _, compiled = fused(model, batch, call)
    times = 0 if call == "embed" else 1
    leaves = call == "attention" and batch > 1  # blocks with nothing to do, by a way of their own
    assert compiled.ptx.count("griddepcontrol.launch_dependents") == times
    assert compiled.ptx.count("griddepcontrol.wait") == times + leaves


@over(calls=CALLS[1:])
def test_before_the_wait_nothing_is_written_and_only_what_lies_still_is_read(model, batch, call):
    _, compiled = fused(model, batch, call)
    before = [compiled.code[i] for i in compiled.before_wait]
    assert not [line for line in before if line.startswith(("st.global", "atom", "red."))]
    early = set().union(*(read.pointers for read in compiled.reads if read.before_wait))
    assert early <= STEADY
    assert not [read for read in compiled.reads if not read.pointers]  # every address was traced to its pointer


@over(batches=(1,), calls=GEMVS)
def test_one_rows_first_weights_are_asked_for_before_the_wait_in_wide_loads_that_leave_the_cache_first(model, batch, call):
    launch, compiled = fused(model, batch, call)
    weights = [read for read in compiled.reads if "weight_ptr" in read.pointers]
    shape = launch.arguments
    assert {read.bytes for read in weights} == {16}
    assert all(read.evict_first for read in weights)
    asked = sum(read.bytes for read in weights if read.before_wait) * 32 * launch.options["num_warps"]
    steps = min(shape["AHEAD"], shape["IN"] // (256 * shape["K_WARPS"]))
    assert asked == steps * shape["PAIRS"] * 1024 * launch.options["num_warps"]


@over(batches=(16,), calls=GEMVS)
def test_a_batch_multiplies_by_wgmma_and_asks_for_all_slices_but_one_of_its_stages_before_the_wait(model, batch, call):
    launch, compiled = fused(model, batch, call)
    assert "wgmma.mma_async" in compiled.ptx
    weights = [read for read in compiled.reads if "weight_ptr" in read.pointers]
    assert {read.bytes for read in weights} == {16}
    asked = sum(read.bytes for read in weights if read.before_wait) * 32 * launch.options["num_warps"]
    slice_bytes = launch.arguments["ROWS"] * launch.arguments["K_SLICE"] * 2 * (2 if call == "norm_gate_up" else 1)
    assert asked == (launch.options["num_stages"] - 1) * slice_bytes


@over(calls=("attention", "o_proj", "down_proj", "sample"))
def test_a_barrier_stands_before_every_counter(model, batch, call):
    launch, compiled = fused(model, batch, call)
    if not call.endswith("proj") or launch.arguments.get("SPLITS", 1) > 1:
        barrier_before_counter(compiled)
    else:
        assert compiled.first("atom") is None


@over(models=(*MODELS, WINDOWED), calls=("attention",))
def test_attention_asks_for_its_first_keys_and_values_before_the_wait(model, batch, call):
    launch, compiled = fused(model, batch, call)
    shape = launch.arguments
    if model == WINDOWED:  # no other test compiles it
        assert shape["WINDOW"] == 4096
        fits(compiled)
    for name in ("k_ptr", "v_ptr"):
        reads = [read for read in compiled.reads if name in read.pointers]
        assert {read.bytes for read in reads} == {16}
        asked = sum(read.bytes for read in reads if read.before_wait) * 32 * launch.options["num_warps"]
        assert asked == shape["BLOCK"] * shape["D_PAD"] * 2 * max(1, shape["STAGES"] - 1)
    assert "mma" in compiled.ptx


@cache
def full_draw(model: str) -> dict[str, Compiled]:
    """The full sampler's kernels by name; the first pass over a search's interval is one of its own."""
    played = played_step(replace(SHAPES[model], num_layers=1), "fused", 1, draw="full")
    launches = [each for each in played if isinstance(each, Launch)][len(CALLS) - 1 :]
    return {f"{each.name} {each.arguments.get('FIRST', '')}": compile_launch(each) for each in launches}


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-7b"])
def test_the_full_sampler_spills_nothing_and_takes_no_part_in_pdl(model):
    kernels = full_draw(model)
    assert len(kernels) == 5
    for compiled in kernels.values():
        fits(compiled)
        assert "griddepcontrol" not in compiled.ptx  # launched without the attribute: each is a full edge


def test_the_full_sampler_adds_integers_alone_where_blocks_meet():
    """Atomic additions of floats would give other bits in another order."""
    atomics = [line for each in full_draw("llama-3.1-8b").values() for line in each.code if line.startswith(("atom", "red."))]
    assert atomics
    assert not [line for line in atomics if re.search(r"\.(f|bf)\d", line)]


@pytest.mark.parametrize("model", [*MODELS, WINDOWED])
def test_no_unfused_kernel_spills(model):
    launches = step(model, "unfused", 1)
    for launch in launches[1:-1]:  # embed and the sampler are as above
        fits(compile_launch(launch))
    compiled = compile_launch(next(launch for launch in launches if launch.name == "_attention_kernel"))
    barrier_before_counter(compiled)
    assert "mma" in compiled.ptx
    for name in ("k_ptr", "v_ptr"):
        narrow = [read.bytes for read in compiled.reads if name in read.pointers and read.bytes != 16]
        assert narrow == [2]  # the current key or value, one row
