"""Owns rotary position scaling: how a config spells it and the inverse frequencies it stands for, in float64.

Does not own the cos and sin tables on the device (decoder) or the rotation (runtime.ops.rope).
"""

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from models.fields import Fields, short
from runtime.errors import CheckpointError, UnsupportedModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model. Fields a type does not use keep their defaults.

    Attributes:
        type: "default" (arXiv 2104.09864), "linear" (arXiv 2306.15595), "llama3" (Llama 3.1's) or "yarn" (arXiv 2309.00071).
        theta: base of the wavelengths.
        factor: how far the context is stretched.
        original_max_position: positions the model was trained on before stretching (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's borders, in wavelengths per original context.
        beta_fast, beta_slow, truncate: yarn's ramp.
        attention_factor: multiplies cos and sin (yarn).
        divisors: of each pair's frequency, where a file lists them (GGUF); one for each of the head_dim / 2 pairs, or none.

    Raises:
        CheckpointError: numbers that give no rotation.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.theta <= 1 or self.factor < 1:
            raise CheckpointError(
                f"rope_theta is {self.theta} and factor {self.factor}; theta must be above 1, factor 1 or above"
            )

    @classmethod
    def from_fields(cls, config: Fields, max_position: int) -> "RopeConfig":
        """Read either spelling: rope_theta beside rope_scaling, or both inside rope_parameters. The nested value wins.

        Raises:
            UnsupportedModelError: a rope type that Quartet does not compute.
            CheckpointError: fields that are missing, of a wrong type, or contradict each other.
        """
        scaling, parameters = config.get("rope_scaling", dict, {}), config.get("rope_parameters", dict, {})
        if scaling and parameters and scaling != parameters:
            raise CheckpointError(f"{config.where}: rope_scaling and rope_parameters differ; keep one of them")
        nested = Fields(scaling or parameters, f"{config.where}: {'rope_scaling' if scaling else 'rope_parameters'}")
        if any(fields.get("partial_rotary_factor", float, 1.0) != 1.0 for fields in (config, nested)):
            raise UnsupportedModelError(f"{config.where}: partial_rotary_factor is not 1; Quartet rotates whole heads only")
        kind = _type_of(nested)
        theta = nested.get("rope_theta", float, None) or config.get("rope_theta", float, 10000.0)
        if kind == "default":
            return cls(theta=theta)
        factor = nested.need("factor", float)
        if kind == "linear":
            return cls("linear", theta, factor)
        # A value beside the table takes precedence here, as it does in transformers.
        original = config.get("original_max_position_embeddings", int, None)
        original = original or nested.get("original_max_position_embeddings", int, max_position)
        if kind == "llama3":
            low, high = nested.need("low_freq_factor", float), nested.need("high_freq_factor", float)
            if low >= high:
                raise CheckpointError(f"{nested.where}: low_freq_factor {low} must lie below high_freq_factor {high}")
            return cls("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)
        fast, slow = nested.get("beta_fast", float, 32.0), nested.get("beta_slow", float, 1.0)
        return cls(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=nested.get("truncate", bool, True),
            attention_factor=nested.get("attention_factor", float, None) or _yarn_attention_factor(nested, factor),
        )

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the head_dim / 2 pairs."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.divisors:
            return [f / divisor for f, divisor in zip(plain, self.divisors, strict=True)]
        if self.type == "linear":
            return [f / self.factor for f in plain]
        if self.type == "llama3":  # Meta's llama-models, apply_scaling: wavelengths in the original context decide
            turns = [self.original_max_position * f / (2 * math.pi) for f in plain]
            kept = [_ramp(t, self.low_freq_factor, self.high_freq_factor) for t in turns]
        elif self.type == "yarn":
            low, high = (self._pair_with(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            kept = [1 - _ramp(i, low, high) for i in range(head_dim // 2)]
        else:
            return plain
        return [keep * f + (1 - keep) * f / self.factor for keep, f in zip(kept, plain, strict=True)]

    def _pair_with(self, turns: float, head_dim: int) -> float:
        """The pair, not whole, that turns this often within the original context."""
        return head_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _ramp(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high`, a line between."""
    return min(max((value - low) / (high - low or 0.001), 0.0), 1.0)


def _type_of(nested: Fields) -> RopeType:
    """The rope type under its newer or older key."""
    new, old = nested.data.get("rope_type"), nested.data.get("type")
    if new is not None and old is not None and new != old:
        raise CheckpointError(f"{nested.where}: rope_type is {short(new)} and type is {short(old)}; keep one of them")
    kind = old if new is None else new
    if kind is None:
        if set(nested.data) - {"rope_theta", "partial_rotary_factor", "rope_type", "type"}:
            raise CheckpointError(f"{nested.where}: rope_type is missing beside {short(sorted(nested.data))}")
        return "default"
    if kind not in get_args(RopeType):
        raise UnsupportedModelError(
            f"{nested.where}: rope_type is {short(kind)}; Quartet computes {', '.join(get_args(RopeType))}: tables that "
            "do not change with the prompt; remove the scaling if prompts stay within the original context"
        )
    return cast(RopeType, kind)


def _yarn_attention_factor(nested: Fields, factor: float) -> float:
    """What yarn multiplies cos and sin by, unless the config says."""
    stretch = 0.1 * math.log(max(factor, 1.0))
    mscale, all_dim = nested.data.get("mscale"), nested.data.get("mscale_all_dim")
    if mscale and all_dim:
        return (stretch * nested.need("mscale", float) + 1) / (stretch * nested.need("mscale_all_dim", float) + 1)
    return stretch + 1
