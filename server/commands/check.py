"""`pilotfish check`: prints the report of `engine.startup.doctor` as text or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pydantic_settings import SettingsConfigDict

from server.config import ServerConfig

if TYPE_CHECKING:
    from engine.startup.doctor import DoctorReport


class CheckConfig(ServerConfig):
    """Can this machine serve this pair, and how? Takes the options, variables and file of `pilotfish serve`.

    Besides: --no-load reads the configs only, and --json prints JSON.
    """

    model_config = SettingsConfigDict(cli_prog_name="pilotfish check")


@dataclass(frozen=True, slots=True)
class CheckCommand:
    """The parsed command: options of the server, and those of the command."""

    config: CheckConfig
    load: bool
    as_json: bool

    @classmethod
    def of(cls, arguments: Sequence[str]) -> CheckCommand:
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--no-load", action="store_true")
        own.add_argument("--json", action="store_true")
        mine, others = own.parse_known_args(arguments)
        return cls(CheckConfig.load(others), not mine.no_load, mine.json)

    def run(self) -> tuple[str, bool]:
        """Return the report as text, and whether the pair works."""
        from engine.startup.doctor import check, problems_told
        from server.chat import ChatTemplate

        report = check(self.config.engine(), load=self.load)
        if report.works:
            with problems_told(report):
                ChatTemplate.load(self.config.target, self.config.revision)
        return json.dumps(report.as_dict(), indent=2) if self.as_json else as_text(report), report.works


def as_text(report: DoctorReport) -> str:
    """Format the report: sections of aligned lines, then the verdict."""
    lines: list[str] = []
    width = max(len(finding.name) for finding in report.findings)
    for section, findings in groupby(report.findings, key=lambda finding: finding.section):
        lines += ["", section, *(f"  {finding.name:<{width}}  {finding.value}" for finding in findings)]
    verdict = "It works." if report.works else "It does not work:"
    return "\n".join([*lines[1:], "", verdict, *(f"  - {problem}" for problem in report.problems)])
