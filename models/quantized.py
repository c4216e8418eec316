"""Owns which of a model's weights are of 8 or 4 bits, and what fills them: rows of a dense checkpoint, quantized as they come,
or the tensors of a quantized checkpoint, taken over code by code.

Does not own the formats (runtime.ops: fp8, lowbit). A model is never dense as a whole: beside the weights stand the rows that
are being read, and one buffer of its widest matrix, in which prefill and the unfused ops make a matrix dense.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from models.layout import Piece, allocate
from models.scheme import FP8_BLOCK, GROUPS, Stored, parts_of
from models.stored import DTYPES
from runtime.errors import CheckpointError, ConfigError, UnsupportedModelError
from runtime.ops.fp8 import Fp8
from runtime.ops.lowbit import BLOCK_ROWS, TILE_ROWS, LowBit, LowBitRows

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Out feature, of eight, in each four bits of an AWQ word, lowest first. Source: AutoAWQ, `awq/utils/packing_utils.py`."""


def is_projection(target: str) -> bool:
    """Whether a decoder's weight is one that is quantized: a layer's projections, neither embedding nor LM head."""
    return target.startswith("model.layers.") and target.endswith("_proj.weight")


def allocate_lowbit(
    table: Iterable[Piece], format: str, stored: Stored | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor | Fp8 | LowBit]:
    """As `layout.allocate`, with the projections in `format`. `stored`: how the checkpoint has them; None: dense.

    Raises:
        UnsupportedModelError: a shape that the format does not hold.
    """
    pieces: dict[str, list[Piece]] = {}
    made: dict[str, Tensor | Fp8 | LowBit] = {**allocate([p for p in table if not is_projection(p.target)], device, dtype)}
    for piece in table:
        if is_projection(piece.target):
            pieces.setdefault(piece.target, []).append(piece)
    shapes = {target: (parts[-1].row + parts[-1].shape[0], parts[-1].shape[1]) for target, parts in pieces.items()}
    scratch = torch.empty(max(map(prod, shapes.values())), dtype=dtype, device=device)
    for target, parts in pieces.items():
        width = shapes[target][1]
        # one scale for a row of INT4 weights is the same one for each of its groups
        group = (stored.group if stored else 0) or (group_of(width, target) if format == "int4" else 0)
        if width % (group or 2):
            what = f"groups of {group}" if group else "pairs"
            instead = "" if stored else "; use --weights bf16"
            raise UnsupportedModelError(f"{target} has {width} in features, which {what} do not divide{instead}")
        if format == "fp8":
            made[target] = Fp8.empty(shapes[target], group, scratch)
            continue
        halves = 2 * BLOCK_ROWS if target.endswith("gate_up_proj.weight") else TILE_ROWS
        for piece in parts:
            if piece.row % BLOCK_ROWS or piece.shape[0] % TILE_ROWS or shapes[target][0] % halves:
                what = f"{format} weights lie by {TILE_ROWS} and are merged by {BLOCK_ROWS}"
                raise UnsupportedModelError(f"{piece.source} has {piece.shape[0]} rows and {what}; use bf16")
        scale_dtype = getattr(torch, stored.scale_dtype) if stored else torch.bfloat16
        made[target] = LowBit.empty(shapes[target], group, scratch, scale_dtype, bool(stored and stored.zeros))
    return made


def group_of(width: int, name: str) -> int:
    """The widest group that divides a row of `width` in features.

    Raises:
        UnsupportedModelError: none does.
    """
    for group in GROUPS:
        if width % group == 0:
            return group
    instead = "bf16" if width % 2 else "fp8"
    raise UnsupportedModelError(
        f"{name} has {width} in features, not a multiple of {GROUPS[-1]}: no int4; use --weights {instead}"
    )


def read_projection(
    name: str, shape: tuple[int, ...], stored: Stored, tensor: Callable[[str], Tensor], has: Callable[[str], bool]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes `[out, in]` uint8, scales and zeros `[out, groups]` of the projection `name`, out of the tensors in its place.

    Raises:
        CheckpointError: a tensor with what no weight can be: NaN, a scale that is not finite, a shape that does not fit.
        UnsupportedModelError: in features in an order of their own (desc_act, actorder).
    """
    rows, width = shape
    zeros: Tensor | None = None
    if stored.method == "fp8":
        codes = tensor(f"{name}.weight").view(torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{name}.weight holds NaN")
        scale_name = f"{name}.weight_scale_inv" if has(f"{name}.weight_scale_inv") else f"{name}.weight_scale"
        scales = _fp8_scales(tensor(scale_name).float(), scale_name, rows, width, stored.group)
    elif stored.method == "packed":
        if has(f"{name}.weight_g_idx"):
            raise UnsupportedModelError(f"{name}.weight_g_idx: in features out of order (actorder) are not read")
        scale_name = f"{name}.weight_scale"
        codes, scales = _nibbles(tensor(f"{name}.weight_packed")), tensor(scale_name)
    elif stored.method == "awq":
        scale_name = f"{name}.scales"
        codes, scales = _awq(tensor(f"{name}.qweight")).t(), tensor(scale_name).t()
        zeros = _awq(tensor(f"{name}.qzeros")).t() if stored.zeros else None
    else:
        scale_name = f"{name}.scales"
        order = torch.arange(width) // (stored.group or width)
        if has(f"{name}.g_idx") and not torch.equal(tensor(f"{name}.g_idx").long().cpu(), order):
            raise UnsupportedModelError(f"{name}.g_idx: in features out of order (desc_act true) are not read")
        codes = _nibbles(tensor(f"{name}.qweight").t().contiguous())
        scales, zeros = tensor(scale_name).t(), _nibbles(tensor(f"{name}.qzeros")).t() + stored.zero_offset
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{scale_name} holds NaN or infinity")
    if codes.shape != shape:
        raise CheckpointError(f"{name} is stored with shape {list(codes.shape)} and config.json asks for {list(shape)}")
    return codes, scales, zeros


def _fp8_scales(scales: Tensor, name: str, rows: int, width: int, group: int) -> Tensor:
    """`[rows, groups]`, whether there is one for the tensor, for each row or for each block."""
    if group:
        if scales.shape != (-(-rows // FP8_BLOCK), width // FP8_BLOCK):
            raise CheckpointError(f"{name} has shape {list(scales.shape)}, not one scale for each block of 128 x 128")
        return scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1)
    if scales.numel() != rows:
        raise CheckpointError(f"{name} has shape {list(scales.shape)}, neither one scale nor one for each of {rows} rows")
    return scales.reshape(rows, 1)


def _nibbles(words: Tensor) -> Tensor:
    """int32 `[n, k]` -> uint8 `[n, 8 * k]`, lowest four bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 0xF).to(torch.uint8).flatten(1)


def _awq(words: Tensor) -> Tensor:
    """int32 `[n, k]` -> uint8 `[n, 8 * k]`, each word in AWQ's order."""
    nibbles = _nibbles(words).view(len(words), -1, 8)
    return torch.empty_like(nibbles).index_copy_(2, torch.tensor(AWQ_ORDER, device=words.device), nibbles).flatten(1)


def settle_weights(wish: str, stored: Stored | None) -> str:
    """The format that --weights asks for: "bf16", "fp8" or "int4"; "auto": as stored.

    Raises:
        ConfigError: another format than a quantized checkpoint has.
    """
    has = stored.format if stored else "bf16"
    if stored and wish not in ("auto", has):
        raise ConfigError(f"weights {wish} was asked for and the checkpoint is stored in {has}; use --weights auto")
    return has if wish == "auto" else wish


def fill_projection(
    rows: Any, piece: Piece, stored: Stored, tensor: Callable[[str], Tensor], has: Callable[[str], bool]
) -> None:
    """Fill rows (LowBitRows) with a projection of a quantized checkpoint."""
    assert isinstance(rows, LowBitRows)
    device, name = rows.weight.scales.device, piece.source.removesuffix(".weight")
    codes, scales, zeros = read_projection(name, piece.shape, stored, lambda part: tensor(part).to(device), has)
    kept = scales.to(rows.weight.scales.dtype)
    if not bool(kept.isfinite().all()):
        largest, dtype = scales.abs().max().item(), str(kept.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} has a scale of {largest:g}, and scales are kept in {dtype}, which does not hold it")
    rows.weight.fill(rows.first, codes, kept, zeros)


def check_projections(entries: dict[str, Any], where: str, table: Iterable[Piece], stored: Stored) -> set[str]:
    """Hold the tensors in the place of projections against their shapes.

    Args:
        entries: of `WeightFiles`, which is of `where`.

    Returns:
        Their names.

    Raises:
        CheckpointError: one is missing or has another shape.
        UnsupportedModelError: one is of a type that its kind does not have.
    """
    used: set[str] = set()
    for piece in table:
        if not is_projection(piece.target):
            continue
        name = piece.source.removesuffix(".weight")
        for part, shape in parts_of(piece.shape, stored).items():
            entry = entries.get(f"{name}.{part}")
            if entry is None:
                raise CheckpointError(f"{where}: {name}.{part} is missing from the weight files")
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.file}: {name}.{part} has shape {list(entry.shape)} and config.json asks for {list(shape)}"
                )
        scales = [part for part in ("weight_scale", "weight_scale_inv") if f"{name}.{part}" in entries]
        if stored.method == "fp8" and not scales:
            raise CheckpointError(f"{where}: {name}.weight_scale is missing from the weight files")
        for part in dict.fromkeys([*parts_of(piece.shape, stored), *scales]):
            entry, types = entries[f"{name}.{part}"], _types(part)
            if entry.dtype not in types:
                what = f"{name}.{part} is stored as {entry.dtype}"
                raise UnsupportedModelError(f"{entry.file}: {what}; Quartet reads {', '.join(types)} there")
        used |= {entry for entry in entries if entry.startswith(f"{name}.")}
    return used


def _types(part: str) -> tuple[str, ...]:
    """What a tensor in a projection's place may be stored as."""
    return ("F8_E4M3",) if part == "weight" else tuple(DTYPES) if "scale" in part else ("I32",)
