"""A program: parts that hang, raise, crash and exit, and between them parts that do not. Says what became of each."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cuda.catalogue import Part
from benchmarks.cuda.report import Folder, PartReport
from benchmarks.cuda.running import run_all
from benchmarks.cuda.setting import Setting


def hangs(_: Setting, section: PartReport) -> None:
    section.say("before it hangs")
    section.number("before", it=1.0)
    time.sleep(1000)


def raises(_: Setting, section: PartReport) -> None:
    section.say("before it raises")
    raise ValueError("what went wrong")


def crashes(_: Setting, section: PartReport) -> None:
    section.say("before it crashes")
    os.kill(os.getpid(), signal.SIGSEGV)


def lacks_a_library() -> None:
    raise ModuleNotFoundError("there is no such library")


def works(_: Setting, section: PartReport) -> None:
    print("printed by a part that works")
    section.say("it works")
    section.number("works", it=2.0)


@dataclass(frozen=True, slots=True)
class Faulty(Part):
    """`work` is a function of this module."""

    def load(self) -> Callable[[Setting, PartReport], None]:
        if self.work == "lacks_a_library":
            lacks_a_library()
        return globals()[self.work]


LIMITS = {"hangs": 1, "raises": 60, "works": 60, "crashes": 60, "lacks_a_library": 60}
PARTS = [Faulty(name, name, f"It {name}", limit, 0) for name, limit in LIMITS.items()]
AT_LAST = Faulty("again", "works", "It works again", 60, 0)

if __name__ == "__main__":
    device, out, first_limit = sys.argv[1:]
    first = Faulty("hangs", "hangs", "It hangs", int(first_limit), 0)
    folder = Folder(Path(out), "faulty")
    folder.begin()
    sys.exit(0 if run_all([first, *PARTS[1:], AT_LAST], Setting(device=device), folder, loading=0) else 1)
