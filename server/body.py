"""Owns the way from a request's bytes to a JSON object: limits, strictness. Does not know the fields (schema)."""

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from runtime.errors import RequestError
from server.errors import BodyTimeoutError, BodyTooLargeError, ClientGoneError

IDLE_SECONDS = 10.0
"""How long the next part of a body may take to arrive."""
DISCARD_BYTES = 1 << 28
"""How much of a refused body is read and thrown away, so that a client which sends first and reads later sees the refusal."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, never more than `limit` bytes of it in memory.

    Raises:
        BodyTooLargeError: over `limit`.
        BodyTimeoutError: nothing arrived for 10 seconds.
        ClientGoneError: the connection closed.
    """
    headers = Headers(scope=scope)
    announced = int(headers.get("content-length", "0"))  # the HTTP parser has refused anything but digits
    if announced > limit and headers.get("expect", "").lower() == "100-continue":
        raise BodyTooLargeError(_too_large(limit))
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= DISCARD_BYTES:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                message = await receive()
        except TimeoutError:
            raise BodyTimeoutError(f"the body is incomplete and nothing arrived for {IDLE_SECONDS:.0f} seconds") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client went away while it sent its request")
        part = message.get("body", b"")
        size, more = size + len(part), message.get("more_body", False)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    if size > limit:
        raise BodyTooLargeError(_too_large(limit))
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """Strict JSON: an object, UTF-8, finite numbers, whole characters.

    Raises:
        RequestError: anything else.
    """
    if not data:  # without Content-Length and chunks HTTP reads no body, whatever follows
        raise RequestError("the request has no body; send a JSON object, with its Content-Length or in chunks")
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE.search(text):  # pairs have become characters by now; a half that is left cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not a character") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError:
        raise RequestError("the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise RequestError("the body holds a number that is too large for a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError("the body holds NaN or Infinity, which is not JSON")


def _too_large(limit: int) -> str:
    return f"the body is over the limit of {limit} bytes; send less, or raise the server's --max-body-bytes"
