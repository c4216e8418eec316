"""The checkpoints and servers that the tests of this folder share. Each server starts when a test first asks for it."""

import pytest

from tests import checkpoints
from tests.server.serving import local_server

END, IM_START, IM_END = 256, 257, 258


def alphabet(token):
    """a to z and the end; A for ever."""
    if token == 65:
        return 65
    return token + 1 if 97 <= token < 122 else END


def with_tok_b(path, next, words=(), **config):
    """A chain with the byte tokenizer."""
    return checkpoints.tok_b(checkpoints.chain(path, next, **config), words=words)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def alphabet_model(folder):
    return with_tok_b(folder / "alphabet", alphabet, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def letters(alphabet_model):
    """`a` to `z`, then the end; `A` never ends. 8 slots of 8192 positions."""
    with local_server(alphabet_model) as server:
        yield server


@pytest.fixture(scope="session")
def fixed_five(folder):
    """A and B with a logit of 5 each, all else 0, whatever came before."""
    with local_server(checkpoints.tok_b(checkpoints.fixed(folder / "five", {65: 5, 66: 5}))) as server:
        yield server


@pytest.fixture
def alive(letters):
    """Behind a test that misuses the server: it still gives its known answer and holds no slot."""
    yield
    assert letters.text("a", max_tokens=3) == "bcd"
    letters.settle()
