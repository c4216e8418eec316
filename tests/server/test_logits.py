"""What a server tells of its logits, against Hugging Face's of the same checkpoint in float32."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import TINY, tok_b
from tests.rule_n import hugging_face, random_ids
from tests.server.serving import TEXT, local_server

LENGTHS = (1, 7, 40, 90)
"""Prompts end within the first chunk of 32, in the second and in the third; a batch of all four decodes together."""
TOP, TOKENS = 5, 12


@pytest.fixture(scope="module")
def checkpoint(folder):
    """Saved by transformers, with weights wide enough that a mistake in rope or mask moves the logits."""
    torch.manual_seed(0)
    path = folder / "saved by transformers"
    LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.1)).save_pretrained(path)
    return tok_b(path)


@pytest.fixture(scope="module")
def server(checkpoint):
    with local_server(checkpoint, text=False, prefill_chunk=32, max_slots=4, max_len=128) as server:  # tokens are told as ids
        yield server


def streamed(server, fields):
    """The same choice of a stream, its parts put together."""
    parts = [event["choices"][0]["logprobs"] for event in server.events(TEXT, **fields)]
    return {name: [each for part in parts if part for each in part[name]] for name in parts[0]}


def assert_told_rightly(told, prompt, logits):
    """Each token's logprob and the best ones' are log-softmax of `logits` `[T, V]`, and behind the prompt the best is taken."""
    expected = logits.log_softmax(dim=1)
    ids = [int(token) for token in told["tokens"]]
    assert ids[: len(prompt)] == prompt
    assert len(ids) == len(prompt) + TOKENS == len(told["token_logprobs"]) == len(told["top_logprobs"])
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None  # nothing comes before it
    for position, before in enumerate(expected[:-1], 1):
        assert told["token_logprobs"][position] == pytest.approx(float(before[ids[position]]), abs=1e-3)
        top = {int(token): value for token, value in told["top_logprobs"][position].items()}
        best = before.topk(TOP).values.tolist()
        assert list(top.values()) == pytest.approx(best, abs=1e-3)
        assert [float(before[token]) for token in top] == pytest.approx(best, abs=1e-3)
        if position >= len(prompt):
            assert ids[position] == int(before.argmax())


def test_logprobs_over_http_are_log_softmax_of_hugging_faces_logits(server, checkpoint):
    """For every position of prompts and answers, alone, in a batch, and streamed."""
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    fields = dict(echo=True, logprobs=TOP, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    together = [choice["logprobs"] for choice in server.complete(prompts, **fields)["choices"]]
    for prompt, batched in zip(prompts, together, strict=True):
        ids = [int(token) for token in batched["tokens"]]
        logits = hugging_face(checkpoint, ids, torch.float32)
        alone = server.complete(prompt, **fields)["choices"][0]["logprobs"]
        for told in (batched, alone, streamed(server, dict(fields, prompt=prompt))):
            assert_told_rightly(told, prompt, logits)
