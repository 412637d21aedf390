"""The output folder of a run: few files, each written as results arrive, so that a killed run keeps its results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Folder:
    """NAME.md has all sections, NAME.json their numbers, NAME.log all printed output; NAME is the command's name."""

    path: Path
    name: str

    @property
    def page(self) -> Path:
        """Return the path of the sections."""
        return self.path / f"{self.name}.md"

    @property
    def numbers(self) -> Path:
        """Return the path of the numbers, `{part: {key: value}}`."""
        return self.path / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """Return the path of the printed output of all parts."""
        return self.path / f"{self.name}.log"

    def begin(self) -> None:
        """Delete the files of an earlier run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for file in (self.page, self.numbers, self.log):
            file.unlink(missing_ok=True)
            file.touch()

    def write(self, *lines: str) -> None:
        """Append to the page."""
        with self.page.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def put(self, part: str, values: dict[str, Any]) -> None:
        """Add numbers of a part. The file is replaced atomically: after a kill it has the old or the new content."""
        text = self.numbers.read_text()
        found = json.loads(text) if text else {}
        found.setdefault(part, {}).update(values)
        fresh = self.numbers.with_suffix(".new")
        fresh.write_text(json.dumps(found, indent=1))
        os.replace(fresh, self.numbers)


@dataclass(frozen=True, slots=True)
class PartReport:
    """Writes the results of one part."""

    folder: Folder
    part: str

    def say(self, text: str) -> None:
        """Write a paragraph."""
        self.folder.write("", text)

    def table(self, *columns: str) -> None:
        """Begin a table."""
        self.folder.write("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")

    def row(self, *cells: object) -> None:
        """Write one row of the table."""
        self.folder.write(f"| {' | '.join(map(str, cells))} |")

    def number(self, key: str, **values: float | str | None) -> None:
        """Store values for programs to read later, under `part: {key: {name: value}}`."""
        self.folder.put(self.part, {key: values})

    def needs_a_card(self, what: str) -> None:
        """Write that `what` needs a GPU; used in a dry run on a CPU."""
        self.say(f"{what}: needs a card.")

    def file(self, name: str, text: str) -> None:
        """Write a separate file to the folder."""
        (self.folder.path / name).write_text(text)

    def failed(self, why: Seq[str]) -> None:
        """Write the end of this section: what failed, with the last lines of the error."""
        self.folder.write("", "**Failed.**", "", "```", *why, "```")
