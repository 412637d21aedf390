"""`pilotfish check`: prints the report of `engine.startup.check` as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.startup.check import CheckReport


ERRORS = (ValidationError, OSError)


_ABOUT = """Check whether this machine can serve a model. Accepts the options, variables and file of `pilotfish serve`.

Also: --no-load (read only the config files), and --json (print JSON).
"""


def run(arguments: Sequence[str], _: Callable[[str], None]) -> tuple[str, bool]:
    """Return the report as text, and whether the model can be served."""
    from pilotfish.engine.startup.check import check, collected_problems
    from pilotfish.server.chat import ChatTemplate

    flag = {"action": "store_true"}
    asked, config = ServerConfig.load_with("check", _ABOUT, {"no-load": flag, "json": flag}, arguments)
    report = check(config.engine(), load=not asked.no_load)
    if report.works:
        with collected_problems(report):
            ChatTemplate.load(config.target, config.revision)
    return json.dumps(report.as_dict(), indent=2) if asked.json else as_text(report), report.works


def as_text(report: CheckReport) -> str:
    """Format the report: sections of aligned lines, then the result."""
    lines: list[str] = []
    width = max(len(finding.name) for finding in report.findings)
    for section, findings in groupby(report.findings, key=lambda finding: finding.section):
        lines += ["", section, *(f"  {finding.name:<{width}}  {finding.value}" for finding in findings)]
    verdict = "This machine can serve the model." if report.works else "This machine cannot serve the model:"
    return "\n".join([*lines[1:], "", verdict, *(f"  - {problem}" for problem in report.problems)])
