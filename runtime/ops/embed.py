"""Owns the first launch of a step: from the slots' state to the rows' slots, positions and embeddings.

Does not own the state (it is handed the tensors) or who has which slot.
"""

import torch.nn.functional as F
from torch import Tensor

from runtime.ops import STATE_WIDTH, Rows, SlotState
from runtime.ops._gemv import Scaled
from runtime.ops._triton import tl, triton

BLOCK = 1024


@triton.jit(do_not_specialize=["width"])
def _embed_kernel(
    slot_of_row_ptr,
    token_ptr,
    position_ptr,
    done_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    x_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    width,
    STATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_of_row_ptr + row)
    at = tl.maximum(slot, 0).to(tl.int64) * STATE_WIDTH
    idle = (slot < 0) | (tl.load(done_ptr + at) != 0)
    position = tl.where(idle, 0, tl.load(position_ptr + at))
    token = tl.where(idle, 0, tl.load(token_ptr + at)).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(slots_ptr + row, tl.where(idle, -1, slot))
        tl.store(positions_ptr + row, position)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(table_ptr + token * width + c, mask=c < width, other=0.0)
    tl.store(x_ptr + row * width + c, x, mask=c < width)
    if BEGIN:
        x = x.to(tl.float32)
        g = tl.load(norm_ptr + c, mask=c < width, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + row * width + c, (x * g * SCALE).to(x_ptr.dtype.element_ty), mask=c < width)
        tl.store(squares_ptr + tl.program_id(1) * TOKENS + row, tl.sum(x * x, 0))


def embed(
    slot_of_row: Tensor,
    state: SlotState,
    table: Tensor,
    x: Tensor,
    rows: Rows,
    norm: Tensor | None = None,
    scaled: Scaled | None = None,
) -> None:
    """slot_of_row `[B]` int32, table `[V, C]` -> x `[B, C]`, rows.slots and rows.positions `[B]` int32; idle rows take id 0.
    With `scaled`, made for `embed_blocks(C)` parts, x's next norm, of weight `norm [C]`, is begun there.

    Never launched with the PDL attribute, and neither is the launch after it: a full edge on both sides, so every later kernel
    of the step may read slots and positions before its wait.
    Bytes: one row of the table a row.
    """
    width = table.shape[1]
    begun = (norm, scaled.x, scaled.squares) if scaled is not None else (table, x, x)
    _embed_kernel[(len(slot_of_row), embed_blocks(width))](
        *(slot_of_row, state.token, state.position, state.done, table, rows.slots, rows.positions, x, *begun),
        width,
        STATE_WIDTH=STATE_WIDTH,
        BLOCK=BLOCK,
        BEGIN=scaled is not None,
        TOKENS=scaled.squares.shape[1] if scaled is not None else 1,
        SCALE=scaled.scale if scaled is not None else 1.0,
    )


def embed_blocks(width: int) -> int:
    """Blocks that share a row of `width` features."""
    return -(-width // BLOCK)


def embed_torch(slot_of_row: Tensor, state: SlotState, table: Tensor) -> tuple[Tensor, Rows]:
    """The torch twin."""
    at = slot_of_row.clamp(min=0).long()
    idle = (slot_of_row < 0) | (state.done[at] != 0)
    rows = Rows(slot_of_row.masked_fill(idle, -1), state.position[at].masked_fill(idle, 0))
    return F.embedding(state.token[at].masked_fill(idle, 0), table), rows
