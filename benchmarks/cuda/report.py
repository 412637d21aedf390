"""The folder that a run leaves behind: few files, each written as things happen, so that a kill keeps what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Folder:
    """NAME.md has all sections, NAME.json their numbers, NAME.log what was printed; NAME is that of the command."""

    path: Path
    name: str

    @property
    def page(self) -> Path:
        """The sections."""
        return self.path / f"{self.name}.md"

    @property
    def numbers(self) -> Path:
        """`{part: {key: value}}`."""
        return self.path / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """Everything that any part printed."""
        return self.path / f"{self.name}.log"

    def begin(self) -> None:
        """Nothing is left of an earlier run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for file in (self.page, self.numbers, self.log):
            file.unlink(missing_ok=True)
            file.touch()

    def write(self, *lines: str) -> None:
        """Append to the page."""
        with self.page.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def put(self, part: str, values: dict[str, Any]) -> None:
        """Add numbers of a part. The file is replaced as a whole: a kill leaves the old one or the new one."""
        text = self.numbers.read_text()
        found = json.loads(text) if text else {}
        found.setdefault(part, {}).update(values)
        fresh = self.numbers.with_suffix(".new")
        fresh.write_text(json.dumps(found, indent=1))
        os.replace(fresh, self.numbers)


@dataclass(frozen=True, slots=True)
class PartReport:
    """What one part writes."""

    folder: Folder
    part: str

    def say(self, text: str) -> None:
        """A paragraph of its own."""
        self.folder.write("", text)

    def table(self, *columns: str) -> None:
        """Begin a table."""
        self.folder.write("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")

    def row(self, *cells: object) -> None:
        """One line of it."""
        self.folder.write(f"| {' | '.join(map(str, cells))} |")

    def number(self, key: str, **values: float | str | None) -> None:
        """What a program may want to read later, under `part: {key: {name: value}}`."""
        self.folder.put(self.part, {key: values})

    def needs_a_card(self, what: str) -> None:
        """For a CPU, where something can only be said to be left out."""
        self.say(f"{what}: needs a card.")

    def file(self, name: str, text: str) -> None:
        """A file of its own in the folder."""
        (self.folder.path / name).write_text(text)

    def failed(self, why: Seq[str]) -> None:
        """The end of this section: what went wrong, in the last lines of what was told."""
        self.folder.write("", "**Failed.**", "", "```", *why, "```")
