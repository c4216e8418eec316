"""Owns the times that a decode step's bytes predict, launch by launch, unfused and fused. Measures nothing.

Does not own the bytes (models.traffic) or the ceilings' measurement (launches, chains). Source: a GEMV of B rows on `[n, k]`
weights does 2*B*n*k operations and must read the weights once; attention does two operations with each value of K and V for
every query head that shares it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models.config import DTYPE_BYTES, ModelConfig
from models.traffic import around_launches, layer_launches

MAKE_DENSE = "make dense"
"""The launch that makes a weight of 8 or 4 bits dense for the unfused ops."""


SIZES = (0, 8 << 20, 32 << 20, 128 << 20)
"""Bytes read by the launches of the chains that `Ceilings.ways` are measured with."""
WITH_PDL = " with PDL"
LIBRARY = ("q", "k", "v", "output", "gate", "up", "down", "LM head")
NORMS = ("norm", "q norm", "k norm")
MEET = ("attention", "sampler")

Ways = dict[str, tuple[float, ...]]
"""Microseconds of a launch in a chain of its like that reads SIZES, the first few or all, by the way it reads:

stream: through registers, behind a vector that the launch before wrote, into a sum over the block; "stream with PDL" too
dots: through shared memory into tensor cores, the way of batches; "dots with PDL" too
library: a product of torch's own, one row
row: an operation of torch's on one row; reduction: one that reduces a row
"""


@dataclass(frozen=True)
class Launch:
    """One launch of a step.

    Attributes:
        name: unique in a step; what comes again in a layer carries its number.
        into: the fused launch that does its work (its own name for a fused one).
        times: launches a step.
        hbm_bytes: weights, K and V of one launch; l2_bytes: activations read and written.
        operations: of one launch's products.
        way: how it reads, a key of `Ceilings.ways`; meets: whether its blocks leave partial sums for the last of them.
    """

    name: str
    into: str
    times: int
    hbm_bytes: int
    l2_bytes: int
    operations: int
    way: str
    meets: bool

    @property
    def intensity(self) -> float:
        """Operations for each byte moved."""
        return self.operations / max(1, self.hbm_bytes + self.l2_bytes)


@dataclass(frozen=True)
class Ceilings:
    """What a device gives: rates of reading, and of reading and writing; arithmetic; a host's launch of a torch op and of a
    Triton kernel; a launch of a graph by the way it reads; what blocks that meet at a counter cost more; and the L2 cache's
    bytes for each SM. `source` says where the figures come from."""

    read_gbps: float
    copy_gbps: float
    tflops: float
    torch_us: float
    triton_us: float
    ways: Ways
    meeting_us: float
    sm_l2_bytes: int
    source: str

    def predicted_us(self, launch: Launch, pdl: bool) -> float:
        """Time of one launch in a chain: what its way takes for its bytes, or its arithmetic, and its blocks' meeting."""
        way = launch.way + WITH_PDL if pdl and launch.way + WITH_PDL in self.ways else launch.way
        reads = chain_us(self.ways[way], launch.hbm_bytes, self.read_gbps)
        return max(reads, launch.operations / self.tflops / 1e6) + (self.meeting_us if launch.meets else 0.0)

    def side(self, launch: Launch) -> str:
        """Which side of the roof a launch is on: memory, arithmetic, or under both, where the launch itself rules."""
        memory, arithmetic = launch.hbm_bytes / self.read_gbps / 1e3, launch.operations / self.tflops / 1e6
        if max(memory, arithmetic) < self.ways["stream"][0]:
            return "launch"
        return "memory" if memory >= arithmetic else "arithmetic"


def chain_us(us: Sequence[float], read_bytes: int, read_gbps: float) -> float:
    """Microseconds of a launch that reads `read_bytes`, on the straight lines between `us`, which were measured at SIZES; the
    last line goes on, and a way that was measured at no bytes alone reads at the ceiling."""
    if len(us) == 1:
        return us[0] + read_bytes / read_gbps / 1e3
    after = next((i for i in range(1, len(us)) if read_bytes <= SIZES[i]), len(us) - 1)
    share = (read_bytes - SIZES[after - 1]) / (SIZES[after] - SIZES[after - 1])
    return us[after - 1] + share * (us[after] - us[after - 1])


H200 = Ceilings(
    read_gbps=4433.0,
    copy_gbps=4236.0,
    tflops=989.0,
    torch_us=8.0,
    triton_us=13.5,
    ways={
        "stream": (0.83, 4.39, 9.62, 31.75),
        "stream with PDL": (0.55, 3.60, 7.86, 29.94),
        "dots": (0.83, 4.88, 11.19, 34.64),
        "dots with PDL": (0.55, 2.86, 9.73, 33.00),
        "library": (0.83, 6.02, 10.70, 34.32),
        "row": (1.09,),
        "reduction": (5.96,),
    },
    meeting_us=1.55,
    sm_l2_bytes=476625,
    source="one NVIDIA H200, measured 2026-11-30 with torch 2.11 and triton 3.6, arithmetic by the datasheet",
)


def step_ms(launches: Sequence[Launch], ceilings: Ceilings, pdl: bool) -> float:
    """Predicted time of a step played as one graph."""
    return sum(each.times * ceilings.predicted_us(each, pdl) for each in launches) / 1e3


def step_bytes(launches: Sequence[Launch]) -> int:
    """What a step must read: weights, K and V."""
    return sum(each.times * each.hbm_bytes for each in launches)


def step_name(batch: int, ops: str, weights: str, pdl: bool = False) -> str:
    """What a kind of step is called in results; formats have names of their own, so that `bench compare` keeps them apart."""
    return f"b{batch} {ops}" + (" with PDL" if pdl else "") + ("" if weights == "bf16" else f", {weights}")


def step_launches(config: ModelConfig, dtype: str, batch: int, context: int, ops: str, weights: str = "bf16") -> list[Launch]:
    """A step's launches in order, a layer's once with its number of times.

    Args:
        context: positions a row reads, the one being written included.
        ops: "fused" or "unfused".
        weights: how the projections are stored: "bf16" (dense, in dtype), "fp8" or "int4".
    """
    first, *last = around_launches(config, ops, dtype, batch)
    layer = layer_launches(config, ops, dtype, batch, context - 1, weights)
    launches = (first, *layer, *last)
    names = _numbered([each.name for each in launches])
    into = names if ops == "fused" else _fused_names(config, dtype, names)
    times = [1, *[config.num_layers] * len(layer), *[1] * len(last)]
    group, size = config.num_heads // config.num_kv_heads, DTYPE_BYTES[dtype]
    dense = iter(layer_launches(config, ops, dtype, batch, context - 1))  # products do not depend on what a weight takes
    multiplied = [first, *(each if each.name == MAKE_DENSE else next(dense) for each in layer), *last]
    found = []
    for each, own, name, goal, count in zip(launches, multiplied, names, into, times, strict=True):
        l2 = 0 if each.name == MAKE_DENSE else each.activation_bytes  # a dense matrix is more than L2 holds
        products = 2 * (batch * own.weight_bytes + group * own.kv_bytes) // size
        none = each is first or each.name in ("cache write", MAKE_DENSE)
        way, meets = _way(ops, batch, each.name), each.name in MEET or (batch > 1 and each.name == "proj_residual")
        found.append(Launch(name, goal, count, each.total_bytes - l2, l2, 0 if none else products, way, meets))
    return found


def _way(ops: str, batch: int, name: str) -> str:
    """How a launch reads; attention is one kernel in both ops sets."""
    if ops == "fused" or name == "attention":
        return "stream" if batch == 1 else "dots"
    return "library" if name in LIBRARY else "reduction" if name in NORMS else "row"


def _fused_names(config: ModelConfig, dtype: str, unfused: Sequence[str]) -> list[str]:
    """Of each unfused launch in order, the fused launch that does its work; a matrix is made dense for the next launch."""
    first, *last = around_launches(config, "fused", dtype)
    fused = [first, *layer_launches(config, "fused", dtype), *last]
    names = _numbered([each.name for each in fused])
    goals = [name for name, each in zip(names, fused, strict=True) for _ in each.fuses]
    return [goals[0] if name.startswith(MAKE_DENSE) else goals.pop(0) for name in unfused]


def _numbered(names: Sequence[str]) -> list[str]:
    """Names with what comes again numbered from 2."""
    before = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name} {times + 1}" if times else name for name, times in zip(names, before, strict=True)]


def in_order(launches: Sequence[Launch]) -> list[Launch]:
    """Every launch of a step as the device plays them: the layer's, which have the most times, stand between the others."""
    layers = max(each.times for each in launches)
    inside = [each for each in launches if each.times == layers]
    first = launches.index(inside[0])
    return [*launches[:first], *inside * layers, *launches[first + len(inside) :]]
