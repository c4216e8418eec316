"""Owns ModelConfig: what a checkpoint's config.json says of a decoder, checked. No torch.

Does not own weights (weights) or what the user wants (runtime.config).
"""

from dataclasses import dataclass
from pathlib import Path

from models.fields import Fields
from models.rope import PLAIN, RopeConfig
from runtime.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""What Quartet runs: model_type and the one architecture of it."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelConfig:
    """What the checkpoint says: shapes, and flags where families differ. Validated when made, never changed.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3".
        vocab_size (V), hidden_size (C), intermediate_size (F), num_layers (L), num_heads (H), num_kv_heads (K), head_dim (D).
        max_position: positions the model was made for; None: no limit (random weights).
        rms_norm_eps: of every RMSNorm.
        rope: the rotary embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: per-head RMSNorm of q and k before the rotation.
        window: a query at p sees keys > p - window; None sees all.
        tied: the LM head is the embedding table.
        dtype: "bfloat16", "float16" or "float32", as stored.

    Raises:
        CheckpointError: values that cannot stand together.
        UnsupportedModelError: values that Quartet does not run.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int | None
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = PLAIN
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    tied: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2 or not 2 <= self.head_dim <= 256:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; Quartet runs even head widths from 2 to 256")

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read `path`/config.json.

        Raises:
            CheckpointError: the file is missing, damaged, or contradicts itself.
            UnsupportedModelError: a sound config of a model that Quartet does not run; one sentence says why.
        """
        return cls.from_fields(Fields.read(path / "config.json"))

    @classmethod
    def from_fields(cls, fields: Fields) -> "ModelConfig":
        """Read the object of a config.json; raises as `from_dir`."""
        family = _family(fields)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = fields.optional_integer("head_dim")
        if head_dim is None and hidden % heads:
            raise CheckpointError(f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        max_position = fields.integer("max_position_embeddings")
        activation = fields.text("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"{fields.where}: hidden_act is {activation!r}; Quartet runs silu")
        attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
        return cls(
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim or hidden // heads,
            max_position=max_position,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_fields(fields, max_position),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            window=_window(fields, family),
            tied=fields.flag("tie_word_embeddings"),
            dtype=_dtype(fields),
        )

    @property
    def num_parameters(self) -> int:
        """Every weight once."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2) + self._body_parameters

    @property
    def _body_parameters(self) -> int:
        """Layers and final norm: all but the embedding table and the LM head."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return self.num_layers * (attention + mlp + norms + biases) + self.hidden_size

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights as they lie on the device."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_position(self, dtype: str) -> int:
        """Bytes of K and V of one position, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def bytes_per_token(self, dtype: str, context: int = 0) -> int:
        """Bytes one decode step of one row must read: all weights but the embedding table once, K and V of `context` positions.

        A tied LM head counts. A window bounds the positions read.
        """
        weights = (self._body_parameters + self.vocab_size * self.hidden_size) * DTYPE_BYTES[dtype]
        return weights + min(context, self.window or context) * self.kv_bytes_per_position(dtype)


def _family(fields: Fields) -> str:
    """The family, from model_type and architectures, which must agree."""
    if fields.table("quantization_config"):
        method = fields.table("quantization_config").get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{fields.where}: the checkpoint is quantized (quant_method {method!r}); use its bfloat16 or float16 original"
        )
    architectures = fields.data.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{fields.where}: architectures is {architectures!r}; it must be a list of names")
    by_architecture = {architecture: family for family, architecture in ARCHITECTURES.items()}
    named = [by_architecture.get(name) for name in architectures]
    family = fields.data.get("model_type") or (named[0] if named else None)
    if family not in ARCHITECTURES or any(other != family for other in named):
        given = f"model_type {fields.data.get('model_type')!r}, architectures {architectures!r}"
        known = ", ".join(ARCHITECTURES.values())
        raise UnsupportedModelError(f"{fields.where}: {given} is not supported; Quartet runs {known}")
    return str(family)


def _window(fields: Fields, family: str) -> int | None:
    """The sliding window. Mistral's is 4096 where the key is absent, as in transformers; Qwen's must be switched on."""
    if family == "mistral":
        return fields.optional_integer("sliding_window") if "sliding_window" in fields.data else 4096
    if family == "llama" or not fields.flag("use_sliding_window"):
        return None
    layers = fields.integer("num_hidden_layers")
    kinds = fields.data.get("layer_types")
    if kinds is None:
        full = fields.integer("max_window_layers", 28, least=0)
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    if kinds == ["full_attention"] * layers:
        return None
    if kinds != ["sliding_attention"] * layers:
        raise UnsupportedModelError(
            f"{fields.where}: use_sliding_window mixes windowed and full layers, which Quartet does not run; "
            "set use_sliding_window to false if prompts stay within sliding_window"
        )
    return fields.integer("sliding_window", 4096)


def _dtype(fields: Fields) -> str:
    """What the config says is stored; the weight files have the last word (weights.WeightFiles.dtype)."""
    for name in ("dtype", "torch_dtype"):
        value = str(fields.data.get(name)).removeprefix("torch.")
        if value in DTYPE_BYTES:
            return value
    return "bfloat16"
