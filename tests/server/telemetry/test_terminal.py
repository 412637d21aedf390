"""On a terminal each record takes the place of the progress before it; what is no progress stays."""

from __future__ import annotations

import io
import logging

from pilotfish.server.telemetry.logs import CLEAR_LINE, PROGRESS, TerminalHandler


def test_progress_is_one_line() -> None:
    screen = io.StringIO()
    handler = TerminalHandler(screen)
    handler.setFormatter(logging.Formatter(CLEAR_LINE + "%(message)s"))
    for text, extra in (("1 of 2 MB", PROGRESS), ("2 of 2 MB", PROGRESS), ("ready", {}), ("draining", {})):
        handler.emit(logging.makeLogRecord({"msg": text, **extra}))
    lines = [line.rpartition(CLEAR_LINE)[2] for line in screen.getvalue().split("\n")]
    assert lines == ["ready", "draining", ""]
