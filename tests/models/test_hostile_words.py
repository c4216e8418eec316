"""Names and texts that once ended in a traceback."""

import pytest

from models import Tokenizer, find_model
from runtime.errors import CheckpointError, RequestError
from tests.checkpoints import chain, tok_b


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a" * 5000])
def test_a_name_that_no_path_can_have_is_one_sentence(name):
    with pytest.raises(CheckpointError, match="cannot be a path"):
        find_model(name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(tok_b(chain(tmp_path_factory.mktemp("words"), {})))


def test_a_lone_surrogate_is_refused_in_prompts_and_chats(tokenizer):
    for encode in (lambda: tokenizer.encode("a\ud800"), lambda: tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])):
        with pytest.raises(RequestError, match="lone surrogate"):
            encode()


def test_a_message_of_every_private_character_is_refused(tokenizer):
    """It left no character to stand for typed special tokens, and the search for one ended in a 500."""
    every = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match="private-use"):
        tokenizer.encode_chat([{"role": "user", "content": every}])
    assert tokenizer.encode_chat([{"role": "user", "content": every[1:]}])
