"""Owns the bytes that each launch of a decode step moves, for both ops sets, from a model's shapes. No torch.

Does not own time: bytes over a rate, measured or a datasheet's, are the caller's. Left out are partial sums that a launch
writes and reads itself, and what launches of batches above 1 hand on beside x: small, and never out of the L2 cache.
"""

from dataclasses import dataclass, replace

from models.config import DTYPE_BYTES, ModelConfig
from models.scheme import lowbit_bytes

FLOAT32 = 4


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        name: what it does; fused launches carry the name of their call in `runtime.ops`.
        fuses: names of the unfused launches whose work it does; its own alone if nothing is fused.
        weight_bytes: weights, norms and biases read; at batch 1 nearly all there is, and read from memory every step.
        kv_bytes: keys and values read and written.
        activation_bytes: everything else read and written; small, and mostly found in the L2 cache.
    """

    name: str
    fuses: tuple[str, ...]
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def layer_launches(
    config: ModelConfig, ops: str, dtype: str, batch: int = 1, context: int = 0, weights: str = "bf16"
) -> tuple[Launch, ...]:
    """The launches of one layer, in order: 5 fused; 15 unfused, 17 with per-head q and k norms, 4 more with weights of 8 or 4
    bits, each made dense first.

    Args:
        ops: "fused" or "unfused".
        dtype: of weights, cache and activations; a key of DTYPE_BYTES.
        batch: rows of the step (B).
        weights: how the projections are stored: "bf16" (dense, in dtype), "fp8" or "int4".
        context: positions each row has in the cache before the step; a window bounds those that are read.
    """
    size = DTYPE_BYTES[dtype]
    if ops == "fused":
        return _fused_layer(config, _unfused_layer(config, size, batch, context, weights), size, batch)
    unfused = _unfused_layer(config, size, batch, context, "bf16")
    return unfused if weights == "bf16" else _made_dense(config, unfused, size, weights)


def around_launches(config: ModelConfig, ops: str, dtype: str, batch: int = 1) -> tuple[Launch, ...]:
    """The launches that come once a step: embedding, final norm and LM head (one launch if fused), the plain sampler."""
    c, v, size = config.hidden_size, config.vocab_size, DTYPE_BYTES[dtype]
    embed = Launch("embed", ("embed",), batch * c * size, 0, batch * c * size)
    norm = Launch("norm", ("norm",), c * size, 0, 2 * batch * c * size)
    head = Launch("LM head", ("LM head",), v * c * size, 0, batch * (c * size + v * FLOAT32))
    sampler = Launch("sampler", ("sampler",), 0, 0, batch * v * FLOAT32)
    if ops == "fused":
        return embed, _fuse("norm_lm_head", (norm, head), head.activation_bytes), sampler
    return embed, norm, head, sampler


def _made_dense(config: ModelConfig, unfused: tuple[Launch, ...], size: int, weights: str) -> tuple[Launch, ...]:
    """With a launch before the first use of each merged weight that reads it and writes it dense."""
    launches: list[Launch] = []
    for launch in unfused:
        if launch.name in config.projections:
            rows, width = config.projections[launch.name]
            low = lowbit_bytes(rows, width, weights, config.stored)
            launches.append(Launch("make dense", ("make dense",), low, 0, rows * width * size))
        launches.append(launch)
    return tuple(launches)


def _unfused_layer(config: ModelConfig, size: int, batch: int, context: int, weights: str) -> tuple[Launch, ...]:
    c, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def launch(name: str, weights: int, activations: int, kv_values: int = 0, tables: int = 0) -> Launch:
        """Values a row of activations and K/V, weights once for all rows; `tables` in float32."""
        moved = batch * (activations * size + tables * FLOAT32)
        return Launch(name, (name,), weights * size, batch * kv_values * size, moved)

    def linear(name: str, out: int, features: int, bias: bool) -> Launch:
        made = launch(name, out * features + out * bias, features + out)
        if weights == "bf16":
            return made
        return replace(made, weight_bytes=lowbit_bytes(out, features, weights, config.stored) + out * bias * size)

    seen = min(context + 1, config.window or context + 1)  # the key of this step is among them
    head_norms = (launch("q norm", config.head_dim, 2 * q), launch("k norm", config.head_dim, 2 * kv))
    return (
        launch("norm", c, 2 * c),
        linear("q", q, c, config.qkv_bias),
        linear("k", kv, c, config.qkv_bias),
        linear("v", kv, c, config.qkv_bias),
        *(head_norms if config.qk_norm else ()),
        launch("rope", 0, 2 * (q + kv), tables=config.head_dim),
        launch("cache write", 0, 2 * kv, kv_values=2 * kv),
        launch("attention", 0, 2 * q, kv_values=2 * kv * seen),
        linear("output", c, q, config.o_bias),
        launch("add", 0, 3 * c),
        launch("norm", c, 2 * c),
        linear("gate", f, c, config.mlp_bias),
        linear("up", f, c, config.mlp_bias),
        launch("SiLU · up", 0, 3 * f),
        linear("down", c, f, config.mlp_bias),
        launch("add", 0, 3 * c),
    )


def _fused_layer(config: ModelConfig, unfused: tuple[Launch, ...], size: int, batch: int) -> tuple[Launch, ...]:
    """Weights and K/V as unfused, but for the step's own key and value, which need not be read back; what passes between the
    operations of one launch stays in registers. The raw sums of q, k and v are float32."""
    c, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sums, own_kv = (q + 2 * kv) * FLOAT32, 2 * kv * size
    attention = _fuse("attention", unfused[4:-8], batch * (sums + config.head_dim * FLOAT32 + q * size))
    return (
        _fuse("norm_qkv_rope", unfused[:4], batch * (c * size + sums)),
        replace(attention, kv_bytes=attention.kv_bytes - batch * own_kv),
        _fuse("proj_residual", unfused[-8:-6], batch * (q + 2 * c) * size),
        _fuse("norm_gate_up", unfused[-6:-2], batch * (c + f) * size),
        _fuse("proj_residual", unfused[-2:], batch * (f + 2 * c) * size),
    )


def _fuse(name: str, launches: tuple[Launch, ...], activation_bytes: int) -> Launch:
    """One launch that does the work of several."""
    return Launch(
        name,
        tuple(each.name for each in launches),
        sum(each.weight_bytes for each in launches),
        sum(each.kv_bytes for each in launches),
        activation_bytes,
    )
