"""What the user may want, how `auto` settles, and how memory is fitted before anything is loaded."""

import pytest
import torch

from runtime.config import EngineConfig
from runtime.device import resolve
from runtime.errors import ConfigError, OutOfMemoryError, RequestError
from runtime.kv_cache import RESERVE_BYTES, fit_max_len
from runtime.request import Request, SamplingParams

GB = 10**9


@pytest.mark.parametrize(
    "wrong", [{"max_slots": 0}, {"max_slots": 17}, {"max_len": 1}, {"ops": "fast"}, {"dtype": "int8"}, {"prefill_chunk": 0}]
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} is .*(allowed|needs)"):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -5},
        {"min_p": 2.0},
        {"seed": 2**64},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": float("-inf")},
        {"logit_bias": ((5, 101.0),)},
        {"logit_bias": ((5, float("nan")),)},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        {"logprobs": 21},
        {"logprobs": -1},
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == next(iter(wrong))


def test_a_request_refuses_what_can_never_run():
    for wrong in (
        {"prompt_ids": ()},
        {"max_tokens": 0},
        {"min_tokens": 3, "max_tokens": 2},
        {"end_ids": tuple(range(17))},
        {"prompt_logprobs": 21},
        {"prompt_ids": (1, 2), "cached": 1, "prompt_logprobs": 0},
    ):
        with pytest.raises(RequestError):
            Request(**{"id": "a", "prompt_ids": (1,), **wrong})


def test_auto_settles_to_the_checkpoint_dtype_and_says_why():
    settled, notes = resolve(EngineConfig(device="cpu"), "bfloat16")
    assert (settled.device, settled.dtype, settled.ops, settled.graph) == ("cpu", "bfloat16", "unfused", "off")
    assert any("as stored" in note for note in notes)


@pytest.mark.parametrize("wish", [{"ops": "fused"}, {"graph": "on"}, {"pdl": "on"}])
def test_an_explicit_wish_that_cannot_be_met_is_an_error(wish):
    with pytest.raises(ConfigError, match="was asked for"):
        resolve(EngineConfig(device="cpu", **wish), "float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_cuda_device_is_an_error():
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve(EngineConfig(device="cuda"), "float32")


def test_max_len_takes_what_fits_beside_the_weights():
    fits = fit_max_len(None, 100_000, max_slots=8, bytes_per_position=2**17, weight_bytes=15 * GB, free=20 * GB + RESERVE_BYTES)
    assert fits == 5 * GB // (8 * 2**17)
    assert fit_max_len(None, 4096, 8, 2**17, 15 * GB, 140 * GB) == 4096
    assert fit_max_len(1000, 4096, 8, 2**17, 15 * GB, 140 * GB) == 1000


def test_what_does_not_fit_is_refused_with_the_figures():
    with pytest.raises(OutOfMemoryError, match=r"14\.00 GB free, weights 15\.00 GB"):
        fit_max_len(None, 4096, 8, 2**17, 15 * GB, 14 * GB)
    with pytest.raises(OutOfMemoryError, match=r"at most \d+ positions fit"):
        fit_max_len(100_000, None, 8, 2**17, 15 * GB, 20 * GB)
    with pytest.raises(ConfigError, match="model's limit of 4096"):
        fit_max_len(5000, 4096, 8, 2**17, 15 * GB, 140 * GB)
