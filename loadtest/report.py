"""Writes results: JSON for programs, CSV for spreadsheets, Markdown tables for people. Makes no calls to a server."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from loadtest.phases import Phase
from loadtest.samples import Level, Sample

MIB = 2**20
Row = dict[str, Any]


def conditions(command: str) -> dict[str, str]:
    """Return the command, versions and machine with which the figures were measured."""
    return {
        "command": command,
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "commit": _commit(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor() or "?")


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def row(phase: Phase) -> Row:
    """Return one phase as a flat row; the column names contain the units."""
    summary, account = phase.summary, phase.account
    found: Row = {
        "name": phase.name,
        "rate_per_second": phase.rate,
        "concurrency": phase.concurrency,
        "seconds": summary.seconds,
        "sent": summary.sent,
        **summary.outcomes,
        "served_per_second": summary.served / summary.seconds,
        "tokens_per_second": summary.tokens_per_second,
        "goodput_per_second": summary.goodput,
        "adds_up": phase.adds_up,
        "unhinted": summary.unhinted,
    }
    for name in ("time_to_first_token", "inter_token", "time_per_token", "total", "lag"):
        found |= {f"{name}_{level}_seconds": value for level, value in getattr(summary, name).items()}
    found |= {f"server_{name}": value for name, value in asdict(account).items() if name != "batch_sizes"}
    if phase.usages:
        found |= {"resident_first_mib": phase.resident[0] / MIB, "resident_last_mib": phase.resident[1] / MIB}
    return found


def write(
    folder: Path, told: Mapping[str, Any], phases: Sequence[Phase], samples: Mapping[str, Sequence[Sample]]
) -> None:
    """Write `results.json` (everything except single requests), `phases.csv`, and `requests.csv` (the requests)."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        **told,
        "phases": [{**row(p), "batch_sizes": p.account.batch_sizes, "statuses": p.summary.statuses} for p in phases],
    }
    (folder / "results.json").write_text(json.dumps(_plain(found), indent=1) + "\n", "utf-8")
    _write_csv(folder / "phases.csv", [row(phase) for phase in phases])
    _write_csv(folder / "requests.csv", [{"phase": n} | _sample(s) for n, many in samples.items() for s in many])


def _sample(sample: Sample) -> Row:
    found = {f.name: getattr(sample, f.name) for f in fields(sample) if f.name not in ("gaps", "message")}
    return found | {"time_to_first_token": sample.time_to_first_token, "time_per_token": sample.time_per_token}


def _plain(value: Any) -> Any:
    """Convert to values that JSON supports: keys become text, and NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else [])
        table.writeheader()
        table.writerows(rows)


_COLUMNS = (
    "load", "sent", "served", "refused", "other", "requests/s", "tokens/s", "good/s",
    "first token p50 / p99, s", "per token p50 / p99, ms", "batch", "kept of drafts",
)  # fmt: skip


def table(phases: Iterable[Phase]) -> list[str]:
    """Return the phases as a Markdown table."""
    head = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    return head + ["| " + " | ".join(_cells(phase)) + " |" for phase in phases]


def _cells(phase: Phase) -> list[str]:
    summary, account = phase.summary, phase.account
    load = f"{phase.rate:.1f}/s" if phase.rate is not None else f"{phase.concurrency} callers"
    return [
        f"{phase.name}: {load}",
        str(summary.sent),
        str(summary.served),
        str(summary.refused),
        str(summary.sent - summary.served - summary.refused),
        f"{summary.served / summary.seconds:.1f}",
        f"{summary.tokens_per_second:.0f}",
        f"{summary.goodput:.1f}",
        _pair(summary.time_to_first_token, 1),
        _pair(summary.time_per_token, 1000),
        f"{account.batch_size:.1f}",
        f"{account.acceptance_rate:.2f}",
    ]


def _pair(level: Level, scale: float) -> str:
    return f"{scale * level['p50']:.3g} / {scale * level['p99']:.3g}"
