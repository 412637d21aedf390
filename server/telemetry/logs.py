"""Format of the log: text for people, or one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from server.config import LogFormat


class JsonFormatter(logging.Formatter):
    """One object per record: time, level, logger, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
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
    """Send the log to stderr in this format."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Messages of these at INFO repeat our own log, or are of no use to an operator.
    for chatty in ("uvicorn", "httpx", "httpcore", "filelock", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
