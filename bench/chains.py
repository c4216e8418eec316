"""Owns what one launch of a chain takes, by the bytes that it reads and the way it reads them: the ceilings behind every
predicted step, from kernels that have no part in one. Does not own the read ceiling itself (ceiling) or a step's bytes.

Every chain is a graph of equal launches that together read far more than L2 holds. All ways but the library's are played with
PDL too, where the device has it.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arithmetic import SIZES, WITH_PDL, Ceilings, Ways, chain_us
from bench.steps import Play, graph_of, median, samples_us
from runtime.ops._gemv import let_next_start, wait_for_previous
from runtime.ops._triton import tl, triton

CHAIN_BYTES = 2 << 30
NODES = 400
WIDTH = 2048
"""In features of the library's products: no 7B model's, and rows enough to fill the card at 8 MiB."""
ROW = 4096
"""Values of a row that torch's small launches take."""
BLOCK, BLOCKS = 2048, 8
"""A program's stream: 32 KB, half of it asked for before the wait."""
ROWS, SLICE, COLUMNS, STAGES, PROGRAMS = 64, 256, 16, 3, 256
"""A tile of weights and the columns of x it meets, tiles on their way together, and two programs an SM of an H200."""
PARTS, GROUPS, VALUES = 4, 64, 1024
"""Blocks that meet, how often at a time, and the numbers that each brings."""
UNSEEN = (16 << 20, 64 << 20)
"""Bytes read in turn by the chain that a prediction is tried on."""

Link = Callable[[Tensor, int, dict[str, Any]], None]
"""Launches one link on a stretch of the buffer, the i-th of its chain, with the options of a launch."""


@triton.jit
def stream_kernel(w_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Each program multiplies BLOCKS blocks of w with x `[BLOCK]`, which the kernel before wrote, into one sum: a stream that
    begins behind a dependent load and ends in a reduction over the block."""
    let_next_start(PDL)
    i = tl.arange(0, BLOCK)
    w_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(BLOCKS // 2):
        total += tl.load(w_ptr + s * BLOCK + i).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + i)
    for s in tl.static_range(BLOCKS // 2, BLOCKS):
        total += tl.load(w_ptr + s * BLOCK + i).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) % BLOCK, tl.sum(total * x, 0))


@triton.jit
def dots_kernel(
    w_ptr, x_ptr, out_ptr, tiles, ROWS: tl.constexpr, SLICE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    """Each program takes `tiles` tiles of w, one stretch of memory, through shared memory to the tensor cores, times COLUMNS
    columns of x that change with every tile and come from L2. The first tiles are asked for before the wait."""
    let_next_start(PDL)
    r, k, b = tl.arange(0, ROWS)[:, None], tl.arange(0, SLICE)[None, :], tl.arange(0, COLUMNS)
    w_ptr += tl.program_id(0).to(tl.int64) * tiles * (ROWS * SLICE) + r * SLICE + k
    x_ptr += b[:, None] * SLICE + k
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    next_x = tl.zeros((COLUMNS, SLICE), x_ptr.dtype.element_ty)
    for i in range(tiles):
        w = tl.load(w_ptr + i * (ROWS * SLICE))
        if i == 0:
            wait_for_previous(PDL)
            next_x = tl.load(x_ptr)
        x = next_x
        next_x = tl.load(x_ptr + (i + 1) % tiles * (COLUMNS * SLICE))
        acc = tl.dot(w, tl.trans(x), acc)
    tl.store(out_ptr + tl.program_id(0) * (ROWS * COLUMNS) + r * COLUMNS + b[None, :], acc)


@triton.jit
def meeting_kernel(partial_ptr, counter_ptr, out_ptr, VALUES: tl.constexpr, PARTS: tl.constexpr):
    """PARTS blocks leave VALUES numbers each, and the last to arrive sums them; a single one stores its own."""
    i = tl.arange(0, VALUES)
    group = tl.program_id(0) // PARTS
    value = tl.load(out_ptr + group * VALUES + i)
    if PARTS > 1:
        tl.store(partial_ptr + tl.program_id(0) * VALUES + i, value)
        tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
        if tl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros((VALUES,), tl.float32)
            for part in tl.static_range(PARTS):
                total += tl.load(partial_ptr + (group * PARTS + part) * VALUES + i, cache_modifier=".cg")
            tl.store(out_ptr + group * VALUES + i, total / PARTS)
            tl.store(counter_ptr + group, 0)
    else:
        tl.store(out_ptr + group * VALUES + i, value)


def measure_ways(device: torch.device, node_us: float, node_pdl_us: float | None) -> Ways:
    """Microseconds of a launch that reads SIZES, by way; a few seconds, and 2 GB that are given back.

    Args:
        node_us: of a kernel that does nothing; node_pdl_us: with PDL, None where the device has none.
    """
    buffer, row = _weights(device), torch.randn((1, ROW), device=device, dtype=torch.bfloat16)
    ways = {
        _named(name, pdl): (
            node_pdl_us if pdl and node_pdl_us else node_us,
            *(median(_chain_us(link, buffer, (size,), pdl)) for size in SIZES[1:]),
        )
        for name, link, pdl in _links(device, node_pdl_us is not None)
    }
    ways["row"] = (median(node_samples_us(lambda: row.mul_(1.0), device)),)
    weight = torch.ones(ROW, device=device, dtype=torch.bfloat16)
    ways["reduction"] = (median(node_samples_us(lambda: F.layer_norm(row, (ROW,), weight), device)),)
    return ways


def measure_meeting(device: torch.device) -> float:
    """Microseconds more that a kernel takes whose blocks leave partial sums for the last of them."""
    partial, out = (torch.ones(count * GROUPS * VALUES, device=device) for count in (PARTS, 1))
    counter = torch.zeros(GROUPS, dtype=torch.int32, device=device)

    def us(parts: int) -> float:
        def play() -> None:
            meeting_kernel[(GROUPS * parts,)](partial, counter, out, VALUES=VALUES, PARTS=parts, num_warps=4)

        return median(node_samples_us(play, device))

    return max(0.0, us(PARTS) - us(1))


def tried(device: torch.device, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Chains of launches of sizes that were not measured, predicted from those that were, and then played."""
    buffer, table = _weights(device), []
    for name, link, pdl in _links(device, "stream" + WITH_PDL in ceilings.ways):
        way = _named(name, pdl)
        predicted = sum(chain_us(ceilings.ways[way], size, ceilings.read_gbps) for size in UNSEEN) / len(UNSEEN)
        us = median(_chain_us(link, buffer, UNSEEN, pdl))
        floor = sum(UNSEEN) / len(UNSEEN) / ceilings.read_gbps / 1e3
        row = {"way": way, "launches of MiB": " and ".join(str(size >> 20) for size in UNSEEN), "bytes us": floor}
        table.append({**row, "predicted us": predicted, "measured us": us, "off": f"{100 * (predicted / us - 1):+.1f}%"})
    return table


def ways_table(ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each way: microseconds of a launch by the MiB that it reads."""
    sizes = [f"{size >> 20} MiB, us" for size in SIZES]
    return [
        {"way": way, **dict.fromkeys(sizes), **dict(zip(sizes, us, strict=False))}
        for way, us in [*ceilings.ways.items(), ("blocks that meet, more", (ceilings.meeting_us,))]
    ]


def node_samples_us(play: Play, device: torch.device) -> list[float]:
    """Microseconds of `play` as one node of a graph that is a chain of them."""
    return [us / NODES for us in samples_us(graph_of(play, NODES), device)]


def _named(way: str, pdl: bool) -> str:
    return way + (WITH_PDL if pdl else "")


def _weights(device: torch.device) -> Tensor:
    return torch.empty(CHAIN_BYTES // 2, dtype=torch.bfloat16, device=device).normal_(std=1 / 128)


def _links(device: torch.device, has_pdl: bool) -> list[tuple[str, Link, bool]]:
    """Name, link and PDL of each way to read, with buffers of its own."""
    vectors, tile = [torch.ones(BLOCK, device=device) for _ in range(2)], ROWS * SLICE
    one = torch.randn((1, WIDTH), device=device, dtype=torch.bfloat16)
    x = torch.randn(SIZES[-1] // 2 // (PROGRAMS * tile) * COLUMNS * SLICE, device=device, dtype=torch.bfloat16)
    sums = torch.empty(PROGRAMS * ROWS * COLUMNS, device=device)

    def stream(w: Tensor, i: int, options: dict[str, Any]) -> None:
        before, after = vectors[i % 2], vectors[1 - i % 2]
        grid = (w.numel() // (BLOCK * BLOCKS),)
        stream_kernel[grid](w, before, after, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4, **options)

    def dots(w: Tensor, i: int, options: dict[str, Any]) -> None:
        shape = {"ROWS": ROWS, "SLICE": SLICE, "COLUMNS": COLUMNS, "num_warps": 4, "num_stages": STAGES}
        dots_kernel[(PROGRAMS,)](w, x, sums, w.numel() // (PROGRAMS * tile), **shape, **options)

    def library(w: Tensor, i: int, options: dict[str, Any]) -> None:
        F.linear(one, w.view(-1, WIDTH))

    ours = [(name, link, pdl) for name, link in (("stream", stream), ("dots", dots)) for pdl in (False, True)[: 1 + has_pdl]]
    return [*ours, ("library", library, False)]


def _chain_us(link: Link, buffer: Tensor, sizes: Sequence[int], pdl: bool) -> list[float]:
    """Microseconds a launch of a chain over all of `buffer`, the launches reading `sizes` bytes in turn."""
    pieces, rest, turns = [], buffer, cycle(sizes)
    while len(rest) >= (count := next(turns) // buffer.itemsize):
        pieces.append(rest[:count])
        rest = rest[count:]
    options = {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}

    def chain() -> None:
        for i, piece in enumerate(pieces):
            link(piece, i, options)

    return [us / len(pieces) for us in samples_us(graph_of(chain, 1), buffer.device)]
