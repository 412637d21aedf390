"""Runs parts one after the other, each in its own process with its own time limit.

A part that crashes, hangs or is killed ends only its own process, and the next part runs. While a part works, the
process of the next part loads its libraries and waits. On a CPU the processes are forks of this one, which has loaded
the libraries for all of them.
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

_TOLD = 3  # exit status of a part that has already written why it failed
_LINES = 12  # number of last lines of a traceback


def run_all(parts: Seq[Part], setting: Setting, folder: Folder, loading: float = START) -> bool:
    """Run all parts and return whether all ended well. The first has `loading` more seconds, for its libraries."""
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
    """Load the libraries that the forked processes need."""
    for part in parts:
        try:
            part.load()
        except Exception as error:  # noqa: BLE001 - its own process loads it again and reports the error in its section
            print(f"{part.name} cannot be loaded: {error}", flush=True)


def _sum_up(outcomes: Seq[tuple[Part, str, float]], folder: Folder) -> None:
    section = PartReport(folder, "all")
    folder.write("", "## Parts")
    section.table("part", "how it went", "seconds", "limit")
    for part, outcome, seconds in outcomes:
        section.row(part.name, outcome, f"{seconds:.0f}", part.limit)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The process of a part; it loads its libraries and then waits for its turn."""

    section: PartReport
    process: BaseProcess
    gate: Connection

    @classmethod
    def of(cls, part: Part, setting: Setting, folder: Folder) -> _Ahead:
        # CUDA does not survive a fork, so on a GPU each process starts anew.
        get_context = multiprocessing.get_context
        context = get_context("spawn") if setting.is_cuda else get_context("fork")
        theirs, ours = context.Pipe(duplex=False)
        section = PartReport(folder, part.name)
        process = context.Process(target=_work, args=(part, setting, section, theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return cls(section, process, ours)

    def go(self) -> None:
        """Let the part run. If its process has already ended, `ended` reports that."""
        try:
            self.gate.send(None)
        except BrokenPipeError:
            print(f"{self.section.part}: its process ended before its turn", flush=True)

    def ended(self, deadline: float) -> str:
        """Wait until the process ends or kill it at the deadline; return the outcome in one word."""
        self.process.join(max(0.0, deadline - monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            self.section.failed(["It exceeded its time limit and was killed."])
            return "killed"
        if self.process.exitcode not in (0, _TOLD):
            self.section.failed([f"Its process ended with status {self.process.exitcode}; see the log."])
        return "failed" if self.process.exitcode else "ended"


def _work(part: Part, setting: Setting, section: PartReport, gate: Connection, others: Connection) -> None:
    """Run the part in its process. The process also ends if its parent does, because the gate is closed then."""
    others.close()  # the inherited copy of the parent's end
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
    except Exception:  # noqa: BLE001 - any error is reported, and the next part runs
        trace = traceback.format_exc()
        print(trace, flush=True)
        section.failed(trace.rstrip().splitlines()[-_LINES:])
        sys.exit(_TOLD)


def _end_with_the_parent(gate: Connection) -> None:
    """Exit when the parent ends in any way, because a part that continued would occupy the GPU."""
    try:
        gate.recv()
    except (EOFError, OSError):
        os._exit(1)


def _print_into(section: PartReport) -> None:
    """Redirect all output of this process, including that of libraries, to the log."""
    with section.folder.log.open("a") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s", force=True)
