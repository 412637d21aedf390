"""Runs parts one after the other, each in a process of its own with a limit of its own.

A part that crashes, hangs or is killed ends its own process, and the next goes on. While a part works, the process of
the next loads its libraries and waits. On a CPU processes are copies of this one, which has loaded them once for all.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from time import monotonic

from benchmarks.cuda.catalogue import START, Part
from benchmarks.cuda.report import Folder, PartReport
from benchmarks.cuda.setting import Setting

_TOLD = 3  # exit status of a part that has written itself why it failed
_LINES = 12  # of a traceback's end


def run_all(parts: Seq[Part], setting: Setting, folder: Folder, loading: float = START) -> bool:
    """Whether all parts ended well. The first has `loading` seconds more, for its libraries."""
    deadline, outcomes = monotonic() + loading, list[tuple[Part, str, float]]()
    if not setting.is_cuda:
        _load_for_all(parts)
    ahead = _Ahead.of(parts[0], setting, folder)
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        now, ahead_of = ahead, after
        folder.write("", f"## {part.title}")
        start = monotonic()
        now.go()
        if ahead_of is not None:
            ahead = _Ahead.of(ahead_of, setting, folder)
        deadline += part.limit
        outcome = now.ended(deadline)
        seconds = monotonic() - start
        folder.put(part.name, {"outcome": outcome, "seconds": round(seconds, 1)})
        outcomes.append((part, outcome, seconds))
        print(f"{part.name}: {outcome}, {seconds:.0f} s", flush=True)
    _sum_up(outcomes, folder)
    return all(outcome == "ended" for _, outcome, _ in outcomes)


def _load_for_all(parts: Seq[Part]) -> None:
    """What copies of this process will find loaded."""
    for part in parts:
        try:
            part.load()
        except Exception as error:  # noqa: BLE001 - its own process loads it again, and says so in its section
            print(f"{part.name} cannot be loaded: {error}", flush=True)


def _sum_up(outcomes: Seq[tuple[Part, str, float]], folder: Folder) -> None:
    section = PartReport(folder, "all")
    folder.write("", "## Parts")
    section.table("part", "how it went", "seconds", "limit")
    for part, outcome, seconds in outcomes:
        section.row(part.name, outcome, f"{seconds:.0f}", part.limit)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The process of a part, which loads what it needs and then waits for its turn."""

    section: PartReport
    process: BaseProcess
    gate: Connection

    @classmethod
    def of(cls, part: Part, setting: Setting, folder: Folder) -> _Ahead:
        # CUDA does not survive a fork, so on a card each process begins anew.
        get_context = multiprocessing.get_context
        context = get_context("spawn") if setting.is_cuda else get_context("fork")
        theirs, ours = context.Pipe(duplex=False)
        section = PartReport(folder, part.name)
        process = context.Process(target=_work, args=(part, setting, section, theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return cls(section, process, ours)

    def go(self) -> None:
        """It is its turn. One that has died already says so when it is waited for."""
        try:
            self.gate.send(None)
        except BrokenPipeError:
            print(f"{self.section.part}: its process did not live to see its turn", flush=True)

    def ended(self, deadline: float) -> str:
        """Wait for its end, or end it: what became of it in one word."""
        self.process.join(max(0.0, deadline - monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            self.section.failed(["It had not ended at its limit of time, and was killed."])
            return "killed"
        if self.process.exitcode not in (0, _TOLD):
            self.section.failed([f"Its process ended with status {self.process.exitcode}; the log may say why."])
        return "failed" if self.process.exitcode else "ended"


def _work(part: Part, setting: Setting, section: PartReport, gate: Connection, others: Connection) -> None:
    """All that the process of a part does. Ends with the parent: the gate's other end is closed then."""
    others.close()  # the copy that came along
    _print_into(section)
    try:
        try:
            run = part.load()
        finally:
            gate.recv()
        Thread(target=_end_with_the_parent, args=(gate,), daemon=True).start()
        print(f"---- {part.name}", flush=True)
        run(setting, section)
    except EOFError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, it is told, and the next part runs
        told = traceback.format_exc()
        print(told, flush=True)
        section.failed(told.rstrip().splitlines()[-_LINES:])
        sys.exit(_TOLD)


def _end_with_the_parent(gate: Connection) -> None:
    """However that ends: a part that went on would hold the card."""
    try:
        gate.recv()
    except (EOFError, OSError):
        os._exit(1)


def _print_into(section: PartReport) -> None:
    """Everything that is printed from here on, by libraries too, goes to the log."""
    with section.folder.log.open("a") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s", force=True)
