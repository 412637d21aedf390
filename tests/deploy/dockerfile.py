"""A Dockerfile as its stages, for tests: instructions in the form that they have here. hadolint judges the rest."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.prometheus import DEPLOY

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


@dataclass
class Stage:
    """One FROM and what follows it."""

    parent: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, name: str) -> str:
        return [rest for word, rest in self.instructions if word == name][-1]

    def command(self, name: str) -> list[str]:
        """In exec form; ENTRYPOINT, CMD, or the CMD within HEALTHCHECK."""
        return json.loads(self.last(name)[self.last(name).index("[") :])

    def copies(self) -> list[tuple[list[str], str]]:
        """(sources, destination) of each COPY from the build context."""
        words = [shlex.split(rest) for word, rest in self.instructions if word == "COPY" and "--from" not in rest]
        return [(parts[:-1], parts[-1]) for parts in words]

    def environment(self) -> dict[str, str]:
        pairs = [pair for word, rest in self.instructions if word == "ENV" for pair in shlex.split(rest)]
        return dict(pair.split("=", 1) for pair in pairs)


def stages(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """Every stage by its name, each with the instructions of the stages it builds on before its own."""
    found: dict[str, Stage] = {}
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            parent, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            current = found[name] = Stage(parent, list(found[parent].instructions) if parent in found else [])
        else:
            current.instructions.append((word, rest))
    return found
