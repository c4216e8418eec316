"""Owns what every HTTP request passes: its id, the API key, and the turning of errors into replies; and who may command.

Does not know routes or bodies. Pure ASGI: nothing is buffered.
"""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import QuartetError
from server import logs
from server.errors import (
    INTERNAL,
    ClientGoneError,
    ForeignPageError,
    MediaTypeError,
    NotServingError,
    UnauthorizedError,
    encode,
    error_object,
    nested,
    status_of,
)

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """The outermost of our own layers.

    Args:
        app: what lies behind.
        api_key: what every path asks for as a bearer token, but for `open_paths`; None asks for nothing.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, open_paths: Sequence[str]) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
        logs.request_id.set(request_id)
        state = scope.setdefault("state", {})
        state |= {"began": time.monotonic(), "logged": False}
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            if not self._admits(scope["path"], headers):
                raise UnauthorizedError("the API key is missing or wrong; send it as `Authorization: Bearer KEY`")
            await self._app(scope, receive, send_with_id)
        except ClientGoneError as error:
            log.info("refused: %s", error)
        except asyncio.CancelledError:  # the server ends and waits no longer
            if started:
                raise
            await error_response(NotServingError("the server is draining; try again later"))(scope, receive, send_with_id)
        except Exception as error:
            if not isinstance(error, QuartetError):
                log.exception("failed by a mistake of ours")
                error = INTERNAL
            response = error_response(error)
            if not state["logged"]:
                path, status = ascii(scope["path"])[:100], response.status_code
                logs.tell(log, "refused", path=path, status=status, code=status_of(error).name)
            if started:
                raise
            await response(scope, receive, send_with_id)

    def _admits(self, path: str, headers: Headers) -> bool:
        if self._api_key is None or path in self._open_paths:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)


def refuse_foreign_pages(headers: Headers) -> None:
    """Pass what no page of another site can make a browser send: without it any open tab could command a server on localhost.

    Raises:
        ForeignPageError: an Origin that is not the host asked, whatever --cors-origins allows to read.
        MediaTypeError: a content type that browsers send without asking first.
    """
    origin = headers.get("origin")
    if origin is not None and _host(origin) != headers.get("host", "").lower():
        raise ForeignPageError("a page of another origin may not do this; call it from this server's own pages or from no page")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError("the content type is not application/json; send `Content-Type: application/json`")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def error_response(error: QuartetError) -> Response:
    """A reply by the table of server.errors."""
    status = status_of(error)
    return Response(encode(error_object(error)), status.code, dict(status.headers), "application/json")


async def refuse_route(request: Request, error: Exception) -> Response:
    """The router's own refusals, 404 and 405, in the API's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        body = nested("this endpoint does not take this method; see Allow", "invalid_request_error", "method_not_allowed")
    else:
        body = nested("there is no such endpoint; /docs lists those there are", "invalid_request_error", "not_found")
    return Response(encode(body), error.status_code, error.headers, "application/json")
