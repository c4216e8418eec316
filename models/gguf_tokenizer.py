"""Owns the tokenizer that a GGUF file describes, rebuilt as Hugging Face's files. Does not own reading the file (gguf).

Sources: llama.cpp's pre-tokenizers by name, and the tokenizer.json of the models that they are named after.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from models.fields import one_line
from runtime.errors import CheckpointError, UnsupportedModelError

CONTROL, USER_DEFINED = 3, 4
"""GGUF's types of a special token and of one that is always kept whole."""

MARKS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Tokens that tokenizer_config.json names, and GGUF's word for them."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREES, _ONES = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _THREES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _ONES),
    "tekken": _CASED,
    **dict.fromkeys(("gpt-2", "smollm"), None),
}
"""How text is cut before merging, by the name of the pre-tokenizer; None: as GPT-2 does, for smollm with digits one by one."""


def save_tokenizer(path: Path, fields: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from the metadata of the GGUF file at a path.

    Raises:
        UnsupportedModelError: a kind of tokenizer that is not rebuilt here.
        CheckpointError: its parts do not fit together.
    """
    known = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    kind, pre = str(known.get("model")), str(known.get("pre", "gpt-2"))
    if kind not in ("llama", "gpt2") or (kind == "gpt2" and pre not in SPLITS):
        raise UnsupportedModelError(
            f"{path}: the tokenizer is {kind!r} with pre-tokenizer {pre!r}, which is not rebuilt from GGUF; "
            "use the model's safetensors checkpoint"
        )
    try:
        made = _byte_level(known, pre) if kind == "gpt2" else _sentence_pieces(known)
        names = known["tokens"]
        marks = {f"{key}_token": names[known[f"{name}_token_id"]] for key, name in MARKS.items() if f"{name}_token_id" in known}
        if known.get("add_bos_token", kind == "llama" or SPLITS.get(pre) is _THREES) and "bos_token" in marks:
            bos = marks["bos_token"]
            made.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, known["bos_token_id"])]
            )
        for kinds, special in (((CONTROL,), True), ((USER_DEFINED,), False)):
            words = [name for name, kind in zip(names, known.get("token_type", ()), strict=False) if kind in kinds]
            made.add_tokens([AddedToken(word, special=special, normalized=False) for word in words])
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path}: the tokenizer cannot be rebuilt: {type(error).__name__}: {one_line(error)}") from error
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **marks}
    settings["chat_template"] = fields.get("tokenizer.chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _byte_level(known: dict[str, Any], pre: str) -> Tokenizer:
    """A byte-level BPE."""
    merges = [tuple(merge.split(" ")) for merge in known["merges"]]
    made = Tokenizer(
        BPE(
            vocab={name: i for i, name in enumerate(known["tokens"])},
            merges=merges,
            ignore_merges=SPLITS[pre] in (_THREES, _CASED),
        )
    )
    split, plain = SPLITS[pre], pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain]) if pre == "smollm" else plain
    if SPLITS[pre] is _ONES:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_pieces(known: dict[str, Any]) -> Tokenizer:
    """Llama 2's: pieces with scores, from which the merges follow, and bytes for what is no piece."""
    names, scores = known["tokens"], known["scores"]
    vocab = {name: i for i, name in enumerate(names)}
    normal = [kind == 1 for kind in known.get("token_type", [1] * len(names))]
    pairs = [
        (-score, cut, name)
        for name, score, plain in zip(names, scores, normal, strict=True)
        for cut in range(1, len(name))
        if plain and name[:cut] in vocab and name[cut:] in vocab
    ]
    merges = [(name[:cut], name[cut:]) for _, cut, name in sorted(pairs)]
    unknown = names[known["unknown_token_id"]] if "unknown_token_id" in known else None
    made = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space, prefix = normalizers.Replace(" ", "▁"), known.get("add_space_prefix", True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made
