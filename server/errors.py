"""Owns the one table from error to HTTP status, and the shape of an error reply. Does not own when an error is raised.

Its classes continue the tree of runtime.errors.
"""

import json
from dataclasses import dataclass
from typing import Any

from runtime.errors import BusyError, ContextLengthError, DeviceError, QuartetError, RequestError

MAX_MESSAGE = 1000
"""Characters of a message that reach the client: an error reply stays small, whatever the request held."""


class UnsupportedParameterError(RequestError):
    """A field that would change the answer and is not built."""


class ModelNotFoundError(RequestError):
    """A model name that is not served."""


class UnauthorizedError(RequestError):
    """The API key is missing or wrong."""


class ForeignPageError(RequestError):
    """A page of another origin asks for what only our own may."""


class MediaTypeError(RequestError):
    """The body is not announced as JSON where that is asked for."""


class ModeError(RequestError):
    """A mode that this device cannot play."""


class BodyTooLargeError(RequestError):
    """The body is over the limit."""


class BodyTimeoutError(RequestError):
    """The body did not arrive as announced."""


class NotServingError(BusyError):
    """The server is starting or draining."""


class GenerationError(QuartetError):
    """A sound request that failed while it ran."""


class ClientGoneError(QuartetError):
    """The client closed its connection or stopped reading."""


@dataclass(frozen=True)
class Status:
    """How an error goes out: HTTP status, OpenAI's `type` and `code`, further headers."""

    code: int
    type: str
    name: str | None
    headers: tuple[tuple[str, str], ...] = ()


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

# openai-python retries every 5xx unless told not to; a request that failed as it ran would fail again.
_NO_RETRY = (("x-should-retry", "false"),)

STATUSES: dict[type[QuartetError], Status] = {
    RequestError: Status(400, "invalid_request_error", "invalid_value"),
    ContextLengthError: Status(400, "invalid_request_error", "context_length_exceeded"),
    UnsupportedParameterError: Status(400, "invalid_request_error", "unsupported_parameter"),
    UnauthorizedError: Status(401, "authentication_error", "invalid_api_key", (("www-authenticate", "Bearer"),)),
    ModeError: Status(400, "invalid_request_error", "mode_unavailable"),
    ForeignPageError: Status(403, "permission_error", "foreign_origin"),
    ModelNotFoundError: Status(404, "invalid_request_error", "model_not_found"),
    BodyTimeoutError: Status(408, "invalid_request_error", "body_timeout", (("connection", "close"),)),
    BodyTooLargeError: Status(413, "invalid_request_error", "body_too_large", (("connection", "close"),)),
    MediaTypeError: Status(415, "invalid_request_error", "unsupported_media_type"),
    BusyError: Status(429, "rate_limit_error", "queue_full", (("retry-after", "1"),)),
    NotServingError: Status(503, "server_error", "not_serving", (("retry-after", "5"),)),
    DeviceError: Status(503, "server_error", "device_error", _NO_RETRY),
    GenerationError: Status(500, "server_error", "generation_failed", _NO_RETRY),
    QuartetError: Status(500, "server_error", "internal_error", _NO_RETRY),
}

INTERNAL = QuartetError("the server made a mistake; its log has the details under this request's id")
"""What a client is told of an exception that is ours to fix."""


def status_of(error: QuartetError) -> Status:
    """The table's row of the nearest class above `error`."""
    return next(STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES)


def error_object(error: QuartetError) -> dict[str, Any]:
    """OpenAI's nested error, as a reply's body and as a stream's event."""
    status = status_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return nested(str(error), status.type, status.name, param)


def nested(message: str, type: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}` with a message cut to MAX_MESSAGE characters."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def encode(data: Any) -> bytes:
    """Strict JSON in ASCII: no NaN, no raw U+2028, nothing that a reader of lines could stumble over."""
    return _ENCODER.encode(data).encode("ascii")
