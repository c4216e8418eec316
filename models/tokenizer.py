"""Owns the way between text and token ids: encoding, chat templates, and decoding a stream without half characters.

Does not own which ids end an answer (source) or stop texts (server). The tokenizer itself is Hugging Face's.
"""

import codecs
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import tokenizers
from jinja2 import Environment
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from models.fields import Fields, one_line
from runtime.errors import CheckpointError, ConfigError, RequestError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A folder with none of these has no tokenizer."""

TEMPLATE_SECONDS = 2.0
TAIL = 8
"""Prompt ids decoded in front of an answer, so that its first token keeps its space."""

ROW = 64
"""Ids without text that are kept as context: they are decoded again with every token, and may fill a whole context."""

FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""What the code of a template may raise besides its own errors."""

HALF = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""

HELD = 8
"""Tokens held back for a character to become whole; a character has at most four bytes, so by then the bytes are junk."""

PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = (byte for byte in range(256) if byte not in PRINTABLE)
BYTE_SYMBOLS = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
"""The byte that each symbol of a byte-level vocabulary stands for, as GPT-2 spelled them."""

log = logging.getLogger(__name__)


class Tokenizer:
    """A model folder's tokenizer.

    Args:
        chat_template: the name of one of its chat templates, or a file that holds one; None: its own, of several "default".

    Raises:
        CheckpointError: there is none, or it cannot be loaded. Nothing else takes its place.
        ConfigError: no such chat template.
    """

    def __init__(self, path: Path, chat_template: str | None = None) -> None:
        if not any((path / name).is_file() for name in FILES):
            raise CheckpointError(f"{path} has no tokenizer: one of {', '.join(FILES)} must be there")
        from transformers import AutoTokenizer  # seconds to import, and most doors can fail before it is needed

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a damaged tokenizer raises, from three libraries
            raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {one_line(error)}") from error
        self._hf.model_max_length = sys.maxsize  # the engine refuses long prompts; a warning before would be noise
        self._hf.chat_template = self._chosen(self._hf.chat_template, chat_template)
        if self.has_chat_template:
            try:
                self._render([{"role": "user", "content": "a"}])
            except RequestError as error:
                if isinstance(error.__cause__, TemplateSyntaxError):
                    log.warning("the chat template cannot be used: %s", error)

    @staticmethod
    def _chosen(own: Any, wanted: str | None) -> Any:
        """The template to use: text, or several by name that hold a "default"; None where there is none."""
        named = own if isinstance(own, dict) else {}
        if wanted is not None and wanted not in named:
            try:
                if Path(wanted).is_file():
                    return Path(wanted).read_text(encoding="utf-8")
                raise FileNotFoundError
            except (OSError, ValueError):
                names = ", ".join(named) or "none by name"
                raise ConfigError(
                    f"--chat-template {wanted!r} is neither a file of text nor one of the model's templates ({names})"
                ) from None
        if wanted is None and named and "default" not in named:
            log.warning(
                "the model has several chat templates and no default; choose with --chat-template: %s", ", ".join(named)
            )
            return None
        return own if wanted is None else named[wanted]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with the special tokens that Hugging Face adds. Special tokens in the text count as such.

        A text that already begins with the BOS token gets no second one.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        _require_unicode(text, "prompt")
        ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        bos = self._hf.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation by the model's chat template, ready for the answer.

        Special tokens come from the template alone: one typed in a message becomes plain text, so nobody can forge a turn.

        Raises:
            RequestError: no template, it refuses the messages (in its own words), or they are not valid Unicode.
        """
        if not self.has_chat_template:
            raise RequestError("the model has no chat template; use a plain prompt", "messages")
        said = json.dumps(list(messages), ensure_ascii=False, default=str)
        _require_unicode(said, "messages")
        mark = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in said), None)
        if mark is None:
            raise RequestError("the messages hold every private-use character from U+E000 to U+F8FF; leave one out", "messages")
        text = self._render(_shield(list(messages), self._special, mark))
        if mark not in text:
            return self._hf.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]
        ids: list[int] = []
        for i, part in enumerate(self._special.split(text)):  # odd parts are special tokens
            if i % 2:
                ids.append(self._hf.convert_tokens_to_ids(part))
            elif part:
                plain = re.sub(f"{mark}([0-9]+){mark}", lambda match: chr(int(match.group(1))), part)
                ids += self._without_specials.encode(plain, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; special tokens are left out and spaces stay as the model wrote them."""
        # What transformers' decode comes to without its clean-up of spaces; its own checks cost more than the decoding.
        text: str = self._hf.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def spelling(self, token: int) -> bytes:
        """The bytes an id stands for, half a character's and a special token's name included; none without an entry."""
        piece: str | None = self._hf.convert_ids_to_tokens(token)
        if piece is None or token in self._hf.added_tokens_decoder:
            return (piece or "").encode()
        if self._byte_level:
            return bytes(BYTE_SYMBOLS.get(symbol, 0) for symbol in piece)
        fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        return bytes.fromhex(fallback.group(1)) if fallback else piece.replace("\u2581", " ").encode()

    def cuts(self, ids: Sequence[int]) -> bool:
        """Whether ids end in the middle of a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self.spelling, ids)))
        return decoder.getstate()[0] != b""

    def decode_whole(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text of ids without a character that is only begun at their end, and how many ids come before that one's."""
        text, end = self.decode(ids), len(ids)
        if not text.endswith(HALF) or not self.cuts(ids):
            return text, end  # a U+FFFD that is written out stays
        while self.cuts(ids[:end]):
            end -= 1
        # Byte fallback makes junk of all bytes in a row for one that is; of other tokens the last may hold text, too.
        return max(self.decode(ids[:end]), text.rstrip(HALF), key=len), end

    def stream(self, prompt_ids: Sequence[int]) -> "Detokenizer":
        """The text of an answer to `prompt_ids`, as its ids arrive."""
        return Detokenizer(self, prompt_ids)

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(self._hf.backend_tokenizer.decoder)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Any special token, the longest first, as a group."""
        names = {token.content for token in self._hf.added_tokens_decoder.values() if token.special}
        names |= set(self._hf.all_special_tokens)
        return re.compile(f"({'|'.join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or '(?!)'})")

    @cached_property
    def _without_specials(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as plain text; switching the original would race with other threads."""
        copy = tokenizers.Tokenizer.from_str(self._hf.backend_tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            with _time_limit(TEMPLATE_SECONDS):
                _require_no_power(str(self._hf.chat_template))
                text = self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, *FAILURES) as error:
            raise RequestError(f"the chat template refuses the messages: {one_line(error)}", "messages") from error
        assert isinstance(text, str)
        return text


def template_names(path: Path) -> list[str]:
    """The chat templates of a folder, by name, without loading its tokenizer."""
    names = ["default"] if (path / "chat_template.jinja").is_file() else []
    names += sorted(file.stem for file in (path / "additional_chat_templates").glob("*.jinja"))
    if (path / "tokenizer_config.json").is_file():
        own = Fields.read(path / "tokenizer_config.json").data.get("chat_template")
        listed = own if isinstance(own, list) else [{"name": "default"}] if own else []
        names += [str(entry.get("name")) for entry in listed if isinstance(entry, dict)]
    return list(dict.fromkeys(names))


class Detokenizer:
    """The text of one answer: what decoding prompt and answer gives, less what the prompt alone gives.

    Deltas end at whole characters. Their sum, with `flush`, does not depend on how the ids were cut into pushes, save for bytes
    that are no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        start = max(len(prompt_ids) - TAIL, 0)
        while 0 < start > len(prompt_ids) - TAIL - 3 and b"\x80" <= tokenizer.spelling(prompt_ids[start])[:1] < b"\xc0":
            start -= 1  # to the beginning of a character: see decode_whole
        tail = list(prompt_ids[start:])
        if not tokenizer.decode(tail):
            tail = list(prompt_ids[-ROW:])
        self._ids = tail  # what is decoded: ids whose text is out, then ids held
        self._told_text, self._told = tokenizer.decode_whole(tail)  # a character begun in the prompt is the answer's

    def push(self, ids: Sequence[int]) -> str:
        """Take ids and return the text that is complete with them; it may be empty."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(HALF):
            return self._tell(len(self._ids), text)
        if len(self._ids) - self._told > HELD:
            return self._tell_junk(text)
        return ""

    def flush(self) -> str:
        """What is held when the answer ends; a character cut short is one U+FFFD."""
        text, _ = self._tokenizer.decode_whole(self._ids)
        if self._tokenizer.cuts(self._ids):
            text += HALF
        return self._tell(len(self._ids), text)

    def _tell_junk(self, text: str) -> str:
        """Let go of held ids that three more have not made whole."""
        for end in range(len(self._ids) - 3, self._told, -1):
            part = self._tokenizer.decode(self._ids[:end])
            if text.startswith(part):
                return self._tell(end, part)
        return ""

    def _tell(self, end: int, text: str) -> str:
        """Mark the ids before `end` as told and return their text beyond what is told already."""
        new = text[len(self._told_text) :]
        if new and end > self._told:
            # The ids told now stay as the context of the next; all before them are no longer needed.
            self._ids, self._told = self._ids[self._told :], end - self._told
            self._told_text = self._tokenizer.decode(self._ids[: self._told])
        elif self._told_text or end > 2 * ROW:
            del self._ids[self._told : end]  # without text they are no context either
        return new


def _require_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param}: a lone surrogate is no character; send valid Unicode", param) from None


def _shield(value: Any, special: re.Pattern[str], mark: str) -> Any:
    """A copy of messages, or of a part of them, whose special tokens are spelled as the numbers of their characters."""
    if isinstance(value, str):
        return special.sub(lambda match: "".join(f"{mark}{ord(char)}{mark}" for char in match.group()), value)
    if isinstance(value, Mapping):
        return {key: _shield(item, special, mark) for key, item in value.items()}
    return [_shield(item, special, mark) for item in value] if isinstance(value, list | tuple) else value


def _require_no_power(template: str) -> None:
    """A power of large numbers is one call that ends after hours and lets no other thread run; no real template has one.

    Raises:
        TemplateError: the template takes a power.
    """
    tokens = (text for _, kind, text in Environment().lex(template) if kind != "whitespace")
    if any(text == "**" and before not in ("(", ",") for before, text in pairwise(tokens)):
        raise TemplateError("it takes a power (**), which is not allowed")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End Python code of this thread, such as a template's endless loop, after some seconds."""
    deadline = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TemplateError(f"it ran longer than {seconds:g} seconds")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
