"""A stand-in for the Hugging Face hub on this machine, for tests through HF_ENDPOINT: repositories are folders."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `root`/owner/name; ids in `gated` answer 403 for files. `sent` are the bytes of each answer, by file."""

    def __init__(self, root: Path, gated: set[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.gated = root, gated
        self.sent: dict[str, list[int]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub(root: Path, gated: set[str] = frozenset()) -> Iterator[Hub]:
    """A hub that runs in a thread until the block ends."""
    server = Hub(root, set(gated))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._repository(
                "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "", parts[5] if len(parts) > 5 else "main"
            )
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        if name in self.server.gated:
            return self._refuse(403, "GatedRepo", f"Access to model {name} is restricted.")
        target = self.server.root / name / file
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound", "no such revision")
        if not target.is_file():
            return self._refuse(404, "EntryNotFound", f"no {file}")
        data, status = target.read_bytes(), 200
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if body and (wanted := self.headers.get("Range")):
            first, last = wanted.removeprefix("bytes=").split("-")
            status, size = 206, len(data)
            data = data[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        if body:
            self.server.sent.setdefault(file, []).append(len(data))
        return self._send(status, data, headers, body)

    def _repository(self, name: str, what: str, revision: str) -> None:
        folder = self.server.root / name
        if not folder.is_dir():
            return self._refuse(401, "RepoNotFound", "Repository not found")
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound", "no such revision")
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        about: Any = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files], "private": False}
        if what == "tree":
            oid = "0" * 40
            about = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid} for file in files]
        return self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"}, True)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message}, True)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(data)
