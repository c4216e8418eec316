"""Owns the exception tree that every room raises from. Does not own HTTP statuses (server) or exit codes (the doors).

    QuartetError
    ├── ConfigError             a flag or an EngineConfig field that cannot be met on this machine
    │   └── OutOfMemoryError    weights or cache do not fit; the figures are in the message
    ├── CheckpointError         a model folder or file that is missing, damaged or contradicts itself
    │   └── UnsupportedModelError   a sound checkpoint that Quartet does not run
    ├── RequestError            a request that can never succeed as written
    │   └── ContextLengthError  prompt (or prompt and answer) longer than the context
    ├── BusyError               try again later: the queue is full, or the engine is starting or draining
    └── DeviceError             the device failed under a step; the engine is no longer usable

A message says what was given, what is allowed and what to do. Ours to fix is an `assert`, never one of these.
"""


class QuartetError(Exception):
    """Root of the tree: catch it to turn any caller's mistake into one sentence."""


class ConfigError(QuartetError):
    """A wish that this machine or build cannot meet."""


class OutOfMemoryError(ConfigError):
    """Weights or KV cache do not fit in the memory that is free."""


class CheckpointError(QuartetError):
    """A model folder or file that is missing, damaged or contradicts itself."""


class UnsupportedModelError(CheckpointError):
    """A sound checkpoint of a kind that Quartet does not run."""


class RequestError(QuartetError):
    """A request that can never succeed as written. `param` names the field at fault, when one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt leaves no room in the context for a single token."""


class BusyError(QuartetError):
    """Try again later: the queue is full, or the engine is starting or draining."""


class DeviceError(QuartetError):
    """The device failed under a step; nothing further can run on this engine."""
