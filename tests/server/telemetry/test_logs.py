"""Log lines: for people on a terminal, for programs elsewhere."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest

from pilotfish.server.telemetry import logs


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logged(monkeypatch):
    """Configure the log, log two records, and return the lines."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def lines(log_format: str, stream: io.StringIO, **variables: str) -> list[str]:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure(log_format)
        fields = {"length": 5.999999999999999, "requests": 3, "model": "a b", "address": "1.2.3.4:5"}
        logging.getLogger("a").info("ready", extra={"fields": fields})
        logging.getLogger("a").warning("%d of %d", 1, 2)
        return [line.rpartition(logs.CLEAR_LINE)[2] for line in stream.getvalue().split("\n")[:-1]]

    yield lines
    root.handlers[:] = handlers
    root.setLevel(level)


READY = r'\d\d:\d\d:\d\d INFO ready length=6 requests=3 model="a b" address=1.2.3.4:5'


@pytest.mark.parametrize(
    ("log_format", "stream", "variables", "level"),
    [
        ("auto", Screen, {}, "\x1b[33mWARNING\x1b[0m"),
        ("text", Screen, {"NO_COLOR": ""}, "\x1b[33mWARNING\x1b[0m"),
        ("auto", Screen, {"NO_COLOR": "1"}, "WARNING"),
        ("text", io.StringIO, {}, "WARNING"),
    ],
)
def test_text(log_format, stream, variables, level, logged):
    ready, warning = logged(log_format, stream(), **variables)
    assert re.fullmatch(READY, ready)
    assert warning[9:] == f"{level} 1 of 2"


@pytest.mark.parametrize(("log_format", "stream"), [("auto", io.StringIO), ("json", Screen), ("json", io.StringIO)])
def test_json(log_format, stream, logged):
    ready, warning = map(json.loads, logged(log_format, stream()))
    assert (ready["message"], ready["length"], ready["requests"], ready["model"]) == ("ready", 6.0, 3, "a b")
    assert (warning["level"], warning["logger"], warning["message"]) == ("warning", "a", "1 of 2")
