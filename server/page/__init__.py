"""Owns the page at GET /: its files, read once, and the headers they go out with. Does not own the API, all that it reads.

The page may load nothing from elsewhere and run nothing that is not one of its files; text becomes a text node, never HTML.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types reader"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    # Isolated from other origins, a page may read a clock of microseconds; else browsers round it to a tenth of a millisecond.
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
}


def page_routes() -> list[Route]:
    """`/` and one route for each of the page's files."""
    files = {path.name: path for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in TYPES}
    return [_route("/" if name == "index.html" else f"/page/{name}", path) for name, path in files.items()]


def _route(where: str, path: Path) -> Route:
    body, kind = path.read_bytes(), TYPES[path.suffix]

    async def send(request: Request) -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return Route(where, send)
