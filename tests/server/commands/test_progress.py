"""Progress on a terminal and on a pipe, and budgets of time, by a clock that the test moves."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import signal
import threading

import pytest

from pilotfish.server.commands import progress as module
from pilotfish.server.commands.progress import Progress, Stopped, TimeBudget, duration, signals_deferred, stoppable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_on_a_pipe_a_stage_is_a_line_every_five_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(stream, clock) as progress:
        progress("loading [model]")
        progress.begin("comparing", 40, seconds=90)
        for done in range(1, 11):
            clock.now += 1
            progress.update(done, "[bold]")
        progress.note("a remark")
    assert stream.getvalue().splitlines() == [
        "loading [model]",
        "comparing: 0/40",
        "comparing: 5/40, [bold], 0:05 elapsed, 0:35 left",
        "comparing: 10/40, [bold], 0:10 elapsed, 0:30 left",
        "a remark",
    ]


def test_the_remaining_time_is_at_most_that_until_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock)
    progress.begin("comparing", 1000, seconds=20)
    clock.now += 6
    progress.update(1)
    assert stream.getvalue().splitlines()[-1] == "comparing: 1/1000, 0:06 elapsed, 0:14 left"


def test_on_a_terminal_there_is_one_live_line_and_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, Progress(terminal) as progress:
        progress.begin("comparing [model]", 40)
        progress.update(10, "K=4")
        progress.note("a remark that stays")
    written = b""
    with contextlib.suppress(OSError):  # at the end
        while more := os.read(leader, 1 << 16):
            written += more
    os.close(leader)
    shown = written.decode()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", shown)]
    live = next(line for line in lines if "10/40" in line)
    assert "comparing [model]" in live
    assert "K=4" in live
    assert "a remark that stays" in lines
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "the live line is erased at the end"


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3700)] == ["0:00", "1:00", "59:59", "1:01:40"]


def test_a_budget_begins_no_work_that_would_end_too_late() -> None:
    clock = Clock()
    budget = TimeBudget(10, clock)
    clock.now += 50
    assert budget.fits(1000), "the first piece, whose speed is unknown"
    clock.now -= 50
    with budget.spending(2):
        clock.now += 3
    assert [budget.fits(cost) for cost in (1, 4, 5)] == [True, True, False]
    assert not budget.fits(4, share=0.8)
    with budget.spending(4):
        clock.now += 3
    assert [budget.fits(cost) for cost in (4, 5)] == [True, False], "at the mean speed of one per second"


def test_other_threads_are_not_stoppable() -> None:
    def run() -> None:
        with stoppable(), signals_deferred():
            done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_stop_stays_one_when_a_library_raises_its_own_error_for_it() -> None:
    """And an error before any signal stays an error."""

    def load() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("multiarray failed to import") from None

    with pytest.raises(Stopped) as stopped, stoppable():
        load()
    assert stopped.value.exit_code == 143
    with pytest.raises(ImportError, match="no such"), stoppable():
        raise ImportError("no such library")


def test_a_deferred_signal_stops_after_the_block() -> None:
    done: list[bool] = []

    def run() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append(True)

    with pytest.raises(Stopped) as stopped, stoppable():
        run()
    assert (done, stopped.value.exit_code) == ([True], 143)


def test_a_pipe_has_no_control_characters_and_needs_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bars", None)
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.begin("a", 2)
        progress.update(1)
    assert "\x1b" not in stream.getvalue()
