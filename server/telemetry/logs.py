"""The format of the log: text, or one JSON object per line. On a terminal, progress is shown on one line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from pilotfish.server.config import LogFormat

PROGRESS = {"is_progress": True}  # `extra` of a record that the next one replaces on a terminal
CLEAR_LINE = "\r\x1b[K"


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Replaces the progress line, from any process, with the next record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, without a line break if it is progress."""
        self.terminator = "" if getattr(record, "is_progress", False) else "\n"
        super().emit(record)


class JsonFormatter(logging.Formatter):
    """One object per record: time, level, logger, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(log_format: LogFormat) -> None:
    """Log to stderr in this format."""
    on_terminal = sys.stderr.isatty()
    as_json = log_format == "json" or (log_format == "auto" and not on_terminal)
    rewrites = on_terminal and not as_json
    handler: logging.Handler = TerminalHandler() if rewrites else logging.StreamHandler()
    text = (CLEAR_LINE if rewrites else "") + "%(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # At INFO these repeat our own log or do not help an operator.
    for chatty in ("uvicorn", "httpx", "httpcore", "filelock", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
