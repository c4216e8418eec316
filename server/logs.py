"""Owns how log lines look: text or JSON, each with the id of the request it belongs to. Does not own what is logged."""

import json
import logging
from contextvars import ContextVar
from typing import Any, Literal

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Set by the gate; whatever is logged on the request's behalf carries it."""


def tell(log: logging.Logger, about: str, **fields: Any) -> None:
    """One line at level info with named values: `about a=1 b=2` as text, members of the object as JSON."""
    text = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
    log.info("%s %s", about, text, extra={"about": about, "fields": fields})


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.id = f"[{request_id.get()}] " if request_id.get() else ""
        return super().format(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "request_id": request_id.get()}
        line |= {"message": getattr(record, "about", record.getMessage()), **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(level: str, form: Literal["text", "json"]) -> None:
    """Log to stderr from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(id)s%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
