"""Progress of a command on stderr, its end by a signal, and its time budget. The result on stdout is not touched.

On a terminal there is one live line: the stage, a bar, the number done, and the elapsed and remaining time. Elsewhere a
line is written when a stage begins and then every few seconds, without control characters.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Clock = Callable[[], float]
EVERY_SECONDS = 5.0  # between two lines of a stage that are not on a terminal
_SIGNALS = signal.SIGINT, signal.SIGTERM


class Stopped(KeyboardInterrupt):
    """Expected: SIGINT or SIGTERM. `report`: the results so far, for stdout; `kept`: what is kept, and how to go on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.report, self.kept = "", "nothing was changed"


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` for the first SIGINT or SIGTERM inside the block; a second one ends the process at once.

    `Stopped` also replaces an error that a library raises because of the signal, as C extensions do that are
    interrupted while they import. Only the main thread can do this; in another thread the block runs unchanged.
    """
    stopped: Stopped | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopped
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        stopped = Stopped(number)
        raise stopped

    with _handled_by(stop):
        try:
            yield
        except Exception as error:
            if stopped is None:
                raise
            raise stopped from error


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM only at the end of the block, which for instance starts a process and keeps its id.

    Only the main thread handles signals; in another thread the block runs unchanged.
    """
    came: list[int] = []
    try:
        with _handled_by(lambda number, _: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context with this handler of SIGINT and SIGTERM in the main thread, and no change in another one."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in (_SIGNALS if is_main else ())}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Progress(AbstractContextManager["Progress"]):
    """Shows the current stage of a command. Call it with a stage whose size is unknown."""

    def __init__(self, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bars: Bars | None = None
        self._stage, self._done, self._status = "", 0, ""
        self._total: int | None = None
        self._began = self._shown = clock()
        self._ends: float | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str) -> None:
        self.begin(stage)

    def begin(self, stage: str, total: int | None = None, *, seconds: float | None = None) -> None:
        """Begin a stage of `total` units, which ends after `seconds` at the latest."""
        self._stage, self._total, self._done, self._status = stage, total, 0, ""
        self._began = self._clock()
        self._ends = None if seconds is None else self._began + seconds
        if self._is_live:
            self._bars = self._bars or _bars(self._stream)
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._bars.add_task(stage, total=total, detail="" if total is None else f"0/{total}", left="")
            self._bars.start()
        else:
            self._write(self._began)

    def update(self, done: int, status: str = "") -> None:
        """Show that `done` units of the stage are done, and a remark."""
        self._done, self._status = done, status
        now = self._clock()
        if self._bars is not None:
            detail = f"{self._counted()}{', ' * bool(status)}{status}"
            self._bars.update(self._bars.task_ids[-1], completed=done, detail=detail, left=self._left(now))
        elif now - self._shown >= EVERY_SECONDS:
            self._write(now)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")  # in one piece, also when a signal arrives
            self._stream.flush()

    def _counted(self) -> str:
        return str(self._done) if self._total is None else f"{self._done}/{self._total}"

    def _left(self, now: float) -> str:
        """Return the remaining time of the stage, at its speed so far and at most until its end."""
        bounds = [] if self._ends is None else [max(0.0, self._ends - now)]
        if self._total is not None and self._done:
            bounds.append((now - self._began) / self._done * (self._total - self._done))
        return f"{duration(min(bounds))} left" if bounds else ""

    def _write(self, now: float) -> None:
        self._shown = now
        counted = self._counted() if self._total is not None or self._done else ""
        elapsed = f"{duration(now - self._began)} elapsed" if self._done else ""
        parts = [part for part in (counted, self._status, elapsed, self._left(now) if self._done else "") if part]
        self.note(f"{self._stage}{': ' * bool(parts)}{', '.join(parts)}")


def _bars(stream: TextIO) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    def text(field: str) -> TextColumn:
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))

    columns = text("description"), BarColumn(bar_width=20), text("fields[detail]"), TimeElapsedColumn()
    console = Console(file=stream)
    return Progress(
        *columns, text("fields[left]"), console=console, transient=True, refresh_per_second=4, redirect_stdout=False
    )


def duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, or with hours.

    >>> duration(75.2), duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeBudget:
    """Seconds for work whose speed is measured while it runs.

    Work that would not fit, at the mean speed so far, is not begun. The first piece is always begun, because its speed
    is unknown.
    """

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.clock, self._began, self.seconds = clock, clock(), seconds
        self._spent = self._cost = 0.0

    @property
    def elapsed(self) -> float:
        return self.clock() - self._began

    def fits(self, cost: float, share: float = 1.0) -> bool:
        """Whether work of this cost, in any unit, ends within this share of the seconds."""
        return not self._cost or self.elapsed + cost * self._spent / self._cost <= share * self.seconds

    def learn(self, cost: float, seconds: float) -> None:
        """Take into account that work of this cost took these seconds."""
        self._cost, self._spent = self._cost + cost, self._spent + seconds

    @contextmanager
    def spending(self, cost: float) -> Iterator[None]:
        """Context of work of this cost, from which the speed is learned."""
        start = self.clock()
        yield
        self.learn(cost, self.clock() - start)
