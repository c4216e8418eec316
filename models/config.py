"""Owns ModelConfig: what a checkpoint's config.json says of a decoder, checked. No torch.

Does not own weights (weights) or what the user wants (runtime.config).
"""

from dataclasses import dataclass, field
from pathlib import Path

from models.fields import Fields, short
from models.rope import RopeConfig
from models.scheme import Stored, lowbit_bytes, stored_as
from runtime.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""What Quartet runs: model_type and the one architecture of it. Ministral is a Mistral, Seed-OSS a Llama with other biases."""

SPELLINGS = {"LLaMAForCausalLM": "LlamaForCausalLM"}
"""Older names of an architecture; transformers goes by model_type alone."""

QUANTIZED_BY = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files in which AutoGPTQ, AutoAWQ and ModelOpt say that they have been there."""

MAX_LAYERS = 4096

REMEDIES = {
    "experts": "it is a mixture of experts and Quartet runs dense models; give a dense one",
    "vision": "it wraps a language model with a vision or audio tower; give a text-only checkpoint of the language model",
    "hybrid": "its layers are not all softmax attention; give a plain transformer",
}
"""What to say of kinds that are never run."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelConfig:
    """What the checkpoint says: shapes, and flags where families differ. Validated when made, never changed.

    Attributes:
        family: a key of ARCHITECTURES.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: V, C, F, L, H, K, D.
        max_position: positions the model was made for; None: no limit (random weights).
        rms_norm_eps: of every RMSNorm.
        rope: the rotary embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: per-head RMSNorm of q and k before the rotation.
        merged: q, k and v, and gate and up, are stored as one tensor each.
        window: a query at p sees keys > p - window; None sees all.
        tied: the LM head is the embedding table.
        dtype: "bfloat16", "float16" or "float32", as stored.
        stored: how the projections are stored where they are quantized; None: dense.

    Raises:
        UnsupportedModelError: heads that Quartet does not run.
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
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    merged: bool = False
    window: int | None = None
    tied: bool = False
    dtype: str = "bfloat16"
    stored: Stored | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2 or not 2 <= self.head_dim <= 256:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; Quartet runs even head widths from 2 to 256")
        if self.num_layers > MAX_LAYERS:
            raise UnsupportedModelError(f"num_hidden_layers is {self.num_layers}; Quartet runs up to {MAX_LAYERS}")

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read `path`/config.json.

        Raises:
            CheckpointError: the file is missing, damaged, or contradicts itself.
            UnsupportedModelError: a sound config of a model that Quartet does not run; one sentence says why.
        """
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
            base = Fields.read(path / "adapter_config.json").data.get("base_model_name_or_path")
            raise UnsupportedModelError(
                f"{path} is an adapter of {base!r}, not a model; merge it into its base with peft's merge_and_unload, "
                "save_pretrained the result and give that folder"
            )
        fields = Fields.read(path / "config.json")
        _refuse_quantized(fields, path)
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Fields) -> "ModelConfig":
        """What an object with the keys of config.json says. Raises as `from_dir`."""
        family = _family(fields)
        hidden, heads = fields.need("hidden_size", int), fields.need("num_attention_heads", int)
        # transformers' defaults where the key is absent; null is hidden_size over heads for all
        head_dim = fields.get(
            "head_dim", int, 128 if family in ("qwen3", "seed_oss") and "head_dim" not in fields.data else None
        )
        if head_dim is None and hidden % heads:
            raise CheckpointError(f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        max_position = fields.need("max_position_embeddings", int)
        activation = fields.get("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"{fields.where}: hidden_act is {short(activation)}; Quartet runs silu")
        has_flag = family in ("llama", "qwen3", "seed_oss")
        attention_bias = has_flag and fields.get("attention_bias", bool, family == "seed_oss")
        return cls(
            family=family,
            vocab_size=fields.need("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=fields.need("intermediate_size", int),
            num_layers=fields.need("num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads", int, heads),
            head_dim=head_dim or hidden // heads,
            max_position=max_position,
            rms_norm_eps=fields.get("rms_norm_eps", float, 1e-5 if family == "phi3" else 1e-6),
            rope=RopeConfig.from_fields(fields, max_position),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=fields.get("attention_out_bias", bool, False) if family == "seed_oss" else attention_bias,
            mlp_bias=family in ("llama", "seed_oss") and fields.get("mlp_bias", bool, False),
            qk_norm=family == "qwen3",
            merged=family == "phi3",
            window=_window(fields, family),
            tied=fields.get("tie_word_embeddings", bool, False),
            dtype=_dtype(fields),
            stored=stored_as(fields),
        )

    @property
    def num_parameters(self) -> int:
        """Every weight once."""
        return self._read_parameters + (0 if self.tied else self.vocab_size * self.hidden_size)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Out and in features of a layer's merged projections, by the unfused launch that reads each one's first rows."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, wide = self.hidden_size, self.intermediate_size
        return {"q": (q + 2 * kv, hidden), "output": (hidden, q), "gate": (2 * wide, hidden), "down": (hidden, wide)}

    @property
    def _read_parameters(self) -> int:
        """What a step reads: layers, final norm and LM head, all but an embedding table that is not the LM head."""
        biased = {"q": self.qkv_bias, "output": self.o_bias, "gate": self.mlp_bias, "down": self.mlp_bias}
        layer = sum(rows * (width + biased[name]) for name, (rows, width) in self.projections.items())
        layer += 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)  # its norms
        return self.num_layers * layer + (1 + self.vocab_size) * self.hidden_size

    @property
    def weights(self) -> str:
        """The projections as stored: "bf16" (dense), "fp8" or "int4"."""
        return self.stored.format if self.stored else "bf16"

    def _saved_bytes(self, dtype: str, weights: str) -> int:
        """What the projections of all layers take less in `weights` than dense in `dtype`, scales counted."""
        if weights == "bf16":
            return 0
        saved = (
            rows * width * DTYPE_BYTES[dtype] - lowbit_bytes(rows, width, weights, self.stored)
            for rows, width in self.projections.values()
        )
        return self.num_layers * sum(saved)

    def weight_bytes(self, dtype: str, weights: str = "bf16") -> int:
        """Bytes of the weights as they lie on the device, the projections in `weights`."""
        return self.num_parameters * DTYPE_BYTES[dtype] - self._saved_bytes(dtype, weights)

    def kv_bytes_per_position(self, dtype: str) -> int:
        """Bytes of K and V of one position, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def bytes_per_token(self, dtype: str, context: int = 0, weights: str = "bf16") -> int:
        """Bytes one decode step of one row must read: all weights but the embedding table once, K and V of `context` positions.

        A tied LM head counts. A window bounds the positions read.
        """
        read = self._read_parameters * DTYPE_BYTES[dtype] - self._saved_bytes(dtype, weights)
        return read + min(context, self.window or context) * self.kv_bytes_per_position(dtype)


def _refuse_quantized(fields: Fields, path: Path) -> None:
    """Turn away what was quantized by a tool that says so in a file of its own; what config.json says is read (stored)."""
    for name in QUANTIZED_BY:
        if not fields.data.get("quantization_config") and (path / name).is_file():
            method = Fields.read(path / name).data.get("quant_method", name)
            raise UnsupportedModelError(
                f"{fields.where}: the checkpoint is quantized (quant_method {short(str(method))}) and has no "
                "quantization_config, which Quartet reads; use its bfloat16 or float16 original"
            )


def _family(fields: Fields) -> str:
    """The family, from model_type and architectures, which must agree."""
    model_type, architectures = fields.data.get("model_type"), fields.data.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{fields.where}: architectures is {short(architectures)}; it must be a list of names")
    kind = _kind(fields)
    for family, architecture in ARCHITECTURES.items():
        named = {SPELLINGS.get(name, name) for name in architectures} <= {architecture}
        if kind is None and named and model_type in (family, None) and (model_type or architectures):
            return family
    why = REMEDIES[kind] if kind else f"choose a checkpoint of model_type {', '.join(ARCHITECTURES)}"
    raise UnsupportedModelError(
        f"{fields.where}: model_type {short(model_type)}, architectures {short(architectures)} is not supported; {why}"
    )


def _kind(fields: Fields) -> str | None:
    """A key of REMEDIES where the config has the marks of that kind."""
    config, names = fields.data, str(fields.data.get("architectures")).lower()
    if any(config.get(key) for key in ("vision_config", "audio_config", "text_config", "vision_tower")):
        return "vision"
    if "moe" in names or any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "experts"
    if any(key.startswith(("mamba_", "ssm_", "linear_num_", "attn_layer_")) for key in config):
        return "hybrid"
    kinds = config.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    return "hybrid" if isinstance(kinds, list) and not all(isinstance(k, str) and k in known for k in kinds) else None


def _window(fields: Fields, family: str) -> int | None:
    """The sliding window, of every layer or of none. Mistral's is 4096 where the key is absent, Qwen's must be switched on:
    as in transformers."""
    layers = fields.need("num_hidden_layers", int)
    default = None if family == "phi3" or "sliding_window" in fields.data else 4096
    window = None if family in ("llama", "seed_oss") else fields.get("sliding_window", int, default)
    by_count = ["sliding_attention"] * min(layers, MAX_LAYERS)
    if family in ("qwen2", "qwen3"):
        if not fields.get("use_sliding_window", bool, False):
            return None
        full = 0 if fields.data.get("max_window_layers") == 0 else fields.get("max_window_layers", int, 28)
        by_count[:full] = ["full_attention"] * min(full, layers)
    kinds = set(fields.get("layer_types", list, by_count))
    if window is None or kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise UnsupportedModelError(
            f"{fields.where}: use_sliding_window or layer_types mixes windowed and full layers, which Quartet does not run; "
            f"set sliding_window to null if prompts stay within {window} positions"
        )
    return window


def _dtype(fields: Fields) -> str:
    """What the config says is stored; the weight files have the last word (weights.WeightFiles.settle)."""
    named = (str(fields.data.get(key)).removeprefix("torch.") for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name in DTYPE_BYTES), "bfloat16")
