"""Owns EngineConfig: what the user wants of the engine. Does not own what the checkpoint says (models.ModelConfig)."""

from dataclasses import dataclass
from typing import Literal

from runtime.errors import ConfigError

OpsName = Literal["auto", "fused", "unfused"]
Switch = Literal["auto", "on", "off"]

WEIGHTS = ("auto", "bf16", "fp8", "int4")
DTYPES = ("auto", "bfloat16", "float16", "float32")
MAX_SLOTS = 16


@dataclass(frozen=True)
class EngineConfig:
    """What the user wants. Validated when made, never changed; `auto` is settled by `runtime.device.resolve`.

    Attributes:
        device: "auto", "cpu" or "cuda".
        dtype: "auto" (as stored in the checkpoint), "bfloat16", "float16" or "float32".
        ops: which ops set plays a layer: "auto", "fused" or "unfused".
        graph: whether decode steps replay CUDA graphs: "auto", "on" or "off".
        pdl: programmatic dependent launch between the step's kernels: "auto", "on" or "off".
        max_len: positions a slot can hold, prompt and answer together; None: the model's, cut to what fits.
        max_slots: requests that run at once, 1 to 16.
        prefill_chunk: prompt tokens computed between two decode steps of the running requests.
        prefix_reuse: whether a prompt takes over K and V that an earlier one with the same beginning has left or is using. It
            lets one user time whether another has sent the same text.
        weights: how a layer's projections are stored: "auto" (as in the checkpoint), "bf16" (dense, in dtype), "fp8" or "int4".

    Raises:
        ConfigError: a value outside the ranges above.
    """

    device: str = "auto"
    dtype: str = "auto"
    ops: OpsName = "auto"
    graph: Switch = "auto"
    pdl: Switch = "auto"
    max_len: int | None = None
    max_slots: int = 8
    prefill_chunk: int = 512
    prefix_reuse: bool = True
    weights: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", DTYPES),
            ("weights", WEIGHTS),
            ("ops", ("auto", "fused", "unfused")),
            ("graph", ("auto", "on", "off")),
            ("pdl", ("auto", "on", "off")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if not 1 <= self.max_slots <= MAX_SLOTS:
            raise ConfigError(f"max_slots is {self.max_slots}; allowed: 1 to {MAX_SLOTS}")
        if self.max_len is not None and self.max_len < 2:
            raise ConfigError(f"max_len is {self.max_len}; a slot needs at least 2 positions, one to read and one to write")
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk is {self.prefill_chunk}; allowed: 1 and up")
