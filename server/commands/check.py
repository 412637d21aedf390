"""`pilotfish check`: prints the report of `engine.startup.check` as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.startup.check import CheckReport


ERRORS = (ValidationError, OSError)


_ABOUT = (
    """Check whether this machine can serve a model. Accepts the options, variables and file of `pilotfish serve`."""
)

OPTIONS: dict[str, dict[str, Any]] = {
    "no-load": {"action": "store_true", "help": "read only config files and headers"},
    "json": {"action": "store_true", "help": "print JSON"},
}


def run(arguments: Sequence[str], progress: Callable[[str], None]) -> tuple[str, bool]:
    """Return the report as text, and whether the model can be served."""
    asked, config = ServerConfig.load_with("check", _ABOUT, OPTIONS, arguments)
    progress(f"checking {config.target}")

    from pilotfish.engine.startup.check import check, collected_problems
    from pilotfish.server.chat import ChatTemplate

    report = check(config.engine(), load=not asked.no_load)
    if report.works:
        with collected_problems(report):
            ChatTemplate.load(config.target, config.revision, config.chat_template)
    return json.dumps(report.as_dict(), indent=2) if asked.json else as_text(report), report.works


def as_text(report: CheckReport) -> str:
    """Format the report: sections of aligned lines, then the result."""
    lines: list[str] = []
    width = max(len(finding.name) for finding in report.findings)
    for section, findings in groupby(report.findings, key=lambda finding: finding.section):
        lines += ["", section, *(f"  {finding.name:<{width}}  {finding.value}" for finding in findings)]
    verdict = "This machine can serve the model." if report.works else "This machine cannot serve the model:"
    return "\n".join([*lines[1:], "", verdict, *(f"  - {problem}" for problem in report.problems)])
