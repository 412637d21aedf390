"""The format of the log: text, or one JSON object per line. On a terminal, progress is shown on one line.

A record may have `extra={"fields": {...}}`: key=value in text, further keys in JSON. Floats have 4 significant digits.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from pilotfish.server.config import LogFormat

PROGRESS = {"is_progress": True}  # `extra` of a record that the next one replaces on a terminal
CLEAR_LINE = "\r\x1b[K"
_COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31"}  # yellow, red


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Replaces the progress line, from any process, with the next record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, without a line break if it is progress."""
        self.terminator = "" if getattr(record, "is_progress", False) else "\n"
        super().emit(record)


class TextFormatter(logging.Formatter):
    """`13:42:05 INFO message key=value`, in local time."""

    def __init__(self, *, in_colour: bool = False, begin: str = "") -> None:
        """`begin`: text before each record."""
        super().__init__()
        self._in_colour, self._begin = in_colour, begin

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname
        fields = "".join(f" {name}={_as_text(value)}" for name, value in _fields(record).items())
        if self._in_colour and level in _COLOURS:
            level = f"\x1b[{_COLOURS[level]}m{level}\x1b[0m"
        line = f"{self._begin}{self.formatTime(record, '%H:%M:%S')} {level} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object per record: time, level, logger, message, its fields, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields.items()}


def _as_text(value: Any) -> str:
    """Quote what is not one word."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and " " not in text and "=" not in text else json.dumps(text, ensure_ascii=False)


def is_json(log_format: LogFormat) -> bool:
    """Whether the log is JSON: as configured, else if stderr is no terminal."""
    return log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())


def configure(log_format: LogFormat) -> None:
    """Log to stderr in this format."""
    rewrites = sys.stderr.isatty() and not is_json(log_format)
    handler: logging.Handler = TerminalHandler() if rewrites else logging.StreamHandler()
    in_colour = rewrites and not os.environ.get("NO_COLOR")
    text = TextFormatter(in_colour=in_colour, begin=CLEAR_LINE if rewrites else "")
    handler.setFormatter(JsonFormatter() if is_json(log_format) else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # At INFO these repeat our own log or do not help an operator.
    for chatty in ("uvicorn", "httpx", "httpcore", "filelock", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
