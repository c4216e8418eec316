"""Owns rotary position scaling: how a config spells it and the inverse frequencies it stands for, in float64.

Does not own the cos and sin tables on the device (decoder) or the rotation (runtime.ops.rope).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from models.fields import Fields
from runtime.errors import CheckpointError, UnsupportedModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]

TYPES = ("default", "linear", "llama3", "yarn")


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

    @classmethod
    def from_fields(cls, config: Fields, max_position: int) -> "RopeConfig":
        """Read either spelling: rope_theta beside rope_scaling, or both inside rope_parameters. The nested value wins.

        Raises:
            UnsupportedModelError: a rope type that Quartet does not compute.
            CheckpointError: fields that are missing, of a wrong type, or contradict each other.
        """
        scaling, parameters = config.table("rope_scaling"), config.table("rope_parameters")
        if scaling and parameters and scaling != parameters:
            raise CheckpointError(f"{config.where}: rope_scaling and rope_parameters differ; keep one of them")
        name = "rope_scaling" if scaling else "rope_parameters"
        nested = Fields(scaling or parameters, f"{config.where}: {name}")
        theta = nested.number("rope_theta", config.number("rope_theta", 10000.0))
        if nested.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedModelError(f"{config.where}: partial_rotary_factor is not 1; Quartet rotates whole heads only")
        kind = _type_of(nested)
        if kind == "default":
            return cls(theta=theta)
        factor = nested.number("factor")
        if kind == "linear":
            return cls("linear", theta, factor)
        # A value beside the table takes precedence here, as it does in transformers.
        original = config.optional_integer("original_max_position_embeddings")
        original = original or nested.integer("original_max_position_embeddings", max_position)
        if kind == "llama3":
            low, high = nested.number("low_freq_factor"), nested.number("high_freq_factor")
            if low >= high:
                raise CheckpointError(f"{nested.where}: low_freq_factor {low} must lie below high_freq_factor {high}")
            return cls("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)
        return cls(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=nested.number("beta_fast", 32.0),
            beta_slow=nested.number("beta_slow", 1.0),
            truncate=nested.flag("truncate", True),
            attention_factor=_yarn_attention_factor(nested, factor),
        )

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the head_dim / 2 pairs."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.type == "linear":
            return [f / self.factor for f in plain]
        if self.type == "llama3":
            return [self._llama3(f) for f in plain]
        if self.type == "yarn":
            ramp = self._yarn_ramp(head_dim)
            return [f / self.factor * ramp(i) + f * (1 - ramp(i)) for i, f in enumerate(plain)]
        return plain

    def _llama3(self, frequency: float) -> float:
        """Short waves stay, long ones are stretched, those between are blended. Source: Meta's llama-models, apply_scaling."""
        turns = self.original_max_position * frequency / (2 * math.pi)  # wavelengths in the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        return (1 - blend) * frequency / self.factor + blend * frequency

    def _yarn_ramp(self, head_dim: int) -> Callable[[int], float]:
        """0 where a pair keeps its frequency, 1 where it is stretched, a line between."""

        def pair_with(turns: float) -> float:
            return head_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        return lambda i: min(max((i - low) / width, 0.0), 1.0)


PLAIN = RopeConfig()


def _type_of(nested: Fields) -> RopeType:
    """The rope type under its newer or older key."""
    new, old = nested.data.get("rope_type"), nested.data.get("type")
    if new is not None and old is not None and new != old:
        raise CheckpointError(f"{nested.where}: rope_type is {new!r} and type is {old!r}; keep one of them")
    kind: Any = new if new is not None else old
    if kind is None:
        if set(nested.data) - {"rope_theta", "partial_rotary_factor", "rope_type", "type"}:
            raise CheckpointError(f"{nested.where}: rope_type is missing beside {', '.join(sorted(nested.data))}")
        return "default"
    if kind not in TYPES:
        raise UnsupportedModelError(f"{nested.where}: rope_type is {kind!r}; supported: {', '.join(TYPES)}")
    return cast(RopeType, kind)


def _yarn_attention_factor(nested: Fields, factor: float) -> float:
    """What yarn multiplies cos and sin by, unless the config says."""
    given = nested.optional_number("attention_factor")
    if given is not None:
        return given

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = nested.data.get("mscale"), nested.data.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(nested.number("mscale")) / scale(nested.number("mscale_all_dim"))
    return scale(1.0)
