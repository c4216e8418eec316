"""Owns what a checkpoint's config.json says of its quantization, and which tensors stand in a weight's place. No torch.

Does not own their bits (quantized).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.fields import Fields
from runtime.errors import UnsupportedModelError

GROUPS = (128, 64, 32)
"""In features that may share a scale of 4-bit weights."""

FP8_BLOCK = 128

READ = "fp8 (scales for each tensor, row or block of 128 x 128), compressed-tensors (the same, and 4 bits in groups), awq, gptq"


@dataclass(frozen=True)
class Stored:
    """How a quantized checkpoint stores the projections of its layers.

    Attributes:
        method: "fp8", "packed" (compressed-tensors of 4 bits), "awq" or "gptq".
        group: in features that share a scale; 0: all of them.
        zeros: whether INT4 codes have zeros of their own.
        zero_offset: what is added to a stored zero.
    """

    method: str
    group: int
    zeros: bool = False
    zero_offset: int = 0

    @property
    def format(self) -> str:
        return "fp8" if self.method == "fp8" else "int4"

    @property
    def scale_dtype(self) -> str:
        return "float16" if self.method in ("awq", "gptq") else "float32"


def stored_as(fields: Fields) -> Stored | None:
    """What config.json's quantization_config says; None where there is none.

    Raises:
        UnsupportedModelError: a way of quantizing that is not read; one sentence says which.
    """
    config = fields.get("quantization_config", dict, {}) or fields.get("compression_config", dict, {})
    if not config:
        return None
    method = config.get("quant_method", "unknown")

    def refuse(what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{fields.where}: the checkpoint is quantized (quant_method {method!r}) with {what}; Quartet reads {READ}; "
            "use its bfloat16 or float16 original, with --weights fp8 or int4"
        )

    group = config.get("group_size", 0)
    if method in ("fp8", "fbgemm_fp8"):
        block = config.get("weight_block_size")
        if block not in (None, [FP8_BLOCK, FP8_BLOCK]):
            raise refuse(f"weight_block_size {block}")
        return Stored("fp8", FP8_BLOCK if block else 0)
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit", 4))
        if bits != 4:
            raise refuse(f"{bits} bits")
        if group not in (*GROUPS, -1):
            raise refuse(f"groups of {group}")
        if method == "awq":
            if str(config.get("version", "gemm")).lower() != "gemm":
                raise refuse(f"version {config['version']}")
            return Stored("awq", max(int(group), 0), zeros=True)  # whatever zero_point says: AutoAWQ's kernels always read them
        return Stored(
            "gptq", max(int(group), 0), zeros=True, zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1
        )
    if method == "compressed-tensors":
        return _compressed(config, refuse)
    raise refuse("a method of its own")


def _compressed(config: dict[str, Any], refuse: Callable[[str], UnsupportedModelError]) -> Stored:
    groups = config.get("config_groups")
    only = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if not isinstance(only, dict) or only.get("targets") != ["Linear"]:
        raise refuse("several schemes, or one of single layers")
    weights = only.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel"):
        return Stored("fp8", 0)
    if (kind, bits, strategy) == ("float", 8, "block") and weights.get("block_structure") in ([128, 128], "128x128"):
        return Stored("fp8", FP8_BLOCK)
    if (kind, bits) == ("int", 4) and weights.get("symmetric", True) and config.get("format") == "pack-quantized":
        group = weights.get("group_size") if strategy == "group" else 0 if strategy == "channel" else None
        if group == 0 or group in GROUPS:
            return Stored("packed", int(group))
    raise refuse(f"{kind} of {bits} bits, strategy {strategy}, format {config.get('format')}")


def parts_of(shape: tuple[int, ...], stored: Stored) -> dict[str, tuple[int, ...]]:
    """The tensors in place of a projection's weight `[out, in]` and their shapes, but for FP8's scales, which have several."""
    rows, width = shape
    groups = width // stored.group if stored.group else 1
    if stored.method == "fp8":
        return {"weight": (rows, width)}
    if stored.method == "packed":
        return {"weight_packed": (rows, width // 8), "weight_scale": (rows, groups)}
    words: dict[str, tuple[int, ...]] = {
        "qweight": (width, rows // 8) if stored.method == "awq" else (width // 8, rows),
        "scales": (groups, rows),
    }
    return words | ({"qzeros": (groups, rows // 8)} if stored.zeros else {})


def lowbit_bytes(rows: int, width: int, weights: str, stored: Stored | None) -> int:
    """Bytes of a projection `[rows, width]` of "fp8", or in tiles of "int4", with its scales and zeros."""
    if weights == "fp8":
        return rows * width + 4 * rows * (width // stored.group if stored and stored.group else 1)
    rows, padded = -(-rows // 16) * 16, -(-width // 128) * 128
    group = (stored.group if stored else 0) or next((size for size in GROUPS if width % size == 0), GROUPS[-1])
    scale = 2 if stored is None else 4 if stored.method == "packed" else 2 + stored.zeros
    return rows * padded // 2 + rows * (padded // group) * scale
