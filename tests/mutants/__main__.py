"""Plants faults in a copy of the repository, one at a time, and tells which tests find them.

The copy has an environment of its own, so that every process of a test imports the copy, whatever its variables are. C
is compiled anew where a fault changes it, for this processor alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pilotfish.engine.native import compiled
from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
HEAD = "| # | area | fault | found by `make test` | found by `make test-all` only |\n|---|---|---|---|---|"
LIST = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
WHERE = "import pilotfish.engine, pilotfish.v1; print(pilotfish.engine.__file__, pilotfish.v1.__file__)"


class Copy:
    """A copy of the repository in which faults are planted, and a process in which its tests run."""

    def __init__(self, folder: Path) -> None:
        self.root, self._folder, self._time = folder / "repository", folder, time.time()
        names = subprocess.run(LIST, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in names:
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        self._compile()
        warm = [self._environment(folder / "venv"), "-m", "tests.mutants.warm"]
        environment = os.environ | {"PILOTFISH_CACHE": str(folder / "cache")}
        self._warm = subprocess.Popen(
            warm, cwd=self.root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _compile(self) -> None:
        command = [sys.executable, self.root / "engine" / "native" / "build.py", compiled.runnable()[0].name]
        subprocess.run(command, check=True)

    def _environment(self, folder: Path) -> Path:
        """Make an environment with the copy and with the packages of this one, but not with the repository itself."""
        venv.create(folder, symlinks=True)
        python, scheme = folder / "bin" / "python", {"base": str(folder), "platbase": str(folder)}
        found = map(str, [self.root, self.root / "proto", *map(sysconfig.get_path, ("purelib", "platlib"))])
        Path(sysconfig.get_path("purelib", vars=scheme), "copy.pth").write_text("\n".join(dict.fromkeys(found)))
        seen = subprocess.run([python, "-c", WHERE], env={}, cwd="/", capture_output=True, text=True, check=True).stdout
        assert all(Path(name).is_relative_to(self.root) for name in seen.split()), f"not the copy is imported: {seen}"
        return python

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Within it the copy has the fault."""
        path = self.root / fault.file
        text = path.read_text("utf-8")
        self._write(path, text.replace(fault.old, fault.new), is_c=fault.is_c)
        try:
            yield
        finally:
            self._write(path, text, is_c=fault.is_c)

    def _write(self, path: Path, text: str, *, is_c: bool) -> None:
        """Write a file, with a time of its own: Python knows compiled code by time and length. Compile C."""
        path.write_text(text, "utf-8")
        self._time += 10
        os.utime(path, (self._time, self._time))
        if is_c:
            self._compile()

    def failures(self, tests: Sequence[str], marked: str, *options: str) -> list[str]:
        """Run tests; return those that fail, or how pytest ended if it names none."""
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # examples that other faults have left
        arguments = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", marked, *options, *tests]
        output = self._folder / "output"
        asked = {"arguments": arguments, "output": str(output)}
        print(json.dumps(asked), file=self._warm.stdin, flush=True)
        code, lines = int(self._warm.stdout.readline()), output.read_text("utf-8", "replace").splitlines()
        assert code != 4, f"no such tests: {tests}"
        summary = max((i for i, line in enumerate(lines) if "short test summary" in line), default=len(lines))
        found = [line for line in lines[summary:] if line.startswith(("FAILED ", "ERROR "))]
        ended = [] if code in (0, 5) else [f"pytest ended with {code}"]  # 5: no test was selected
        return [line.split(" ", 1)[1].split(" - ")[0] for line in found] or ended

    def find(self, fault: Fault, *, only_slow: bool) -> tuple[str, str]:
        """Plant a fault and run its tests, then slow ones; return the first that fails, or nothing, and a row."""
        cells, found = ["", ""], ""
        for cell, marked in enumerate(("not slow", "slow")):
            if not found and (cell or not only_slow):
                began = time.monotonic()
                with self.planted(fault):
                    found = next(iter(self.failures(fault.tests, marked, "-x")), "")
                told = f"`{found}`".replace("|", "\\|") if found else "**nothing**"
                cells[cell] = f"{told}, {time.monotonic() - began:.0f} s"
        return found, f"| {fault.number} | {fault.area} | {fault.what} | {' | '.join(cells)} |"


def main() -> int:
    """Run; the exit status is 1 if a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("numbers", type=int, nargs="*", help="of faults; default: all")
    parser.add_argument("--only-slow", action="store_true", help="run only what `make test` leaves out")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    asked = parser.parse_args()
    if stale := [problem for fault in FAULTS for problem in fault.problems(ROOT)]:
        parser.error("; ".join(stale))
    chosen = [fault for fault in FAULTS if not asked.numbers or fault.number in asked.numbers]
    table, finders = [HEAD], dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for fault in chosen:
            finders[fault.number], row = copy.find(fault, only_slow=asked.only_slow)
            table.append(row)
            print(row, flush=True)
            if asked.out:
                asked.out.write_text("\n".join(table) + "\n", "utf-8")
        named = sorted({test for test in finders.values() if "::" in test})
        sick = copy.failures(named, "slow or not slow") if named else []
    missed = [number for number, test in finders.items() if not test]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found; not found: {missed or 'none'}")
    print(f"failing without any fault: {', '.join(sick) or 'none'}")
    return 1 if missed or sick else 0


if __name__ == "__main__":
    sys.exit(main())
