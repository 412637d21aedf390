"""Fault and overload experiments: starts a server on this machine, disturbs it, and writes a report.

python -m loadtest overload    ten times the server's capacity, for a minute
python -m loadtest chaos       cancels, killed clients, stalled readers, deadlines and faults, while engines and one of
                               two replicas are killed, for five minutes
python -m loadtest survive     streams with every option while the engine is killed ten times, --runs times
python -m loadtest replicas    32 streams while one of two replicas is killed or rolled every 30 s, for five minutes
python -m loadtest restart     the pause of a stream when the engine dies
python -m loadtest largest     calls of maximum size, of more than fifty kinds, ten of each kind at once

The overload is a multiple of the capacity measured on this machine. Locust generates ordinary load
(loadtest/locustfile.py), and GuideLLM throughput curves: `make loadtest`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from loadtest.experiments import survival
from loadtest.experiments.chaos import OPTIONS, PROGRAM, chaos, chaos_lines
from loadtest.experiments.largest import largest
from loadtest.experiments.overload import overload
from loadtest.process import ServerProcess
from loadtest.workload import LONG, request

# Interactive callers want a first token within a second, so a request waits in the queue for at most half of that.
INTERACTIVE = ("--max-queue-seconds", "0.5")
Results = tuple[dict[str, Any], list[str], Iterable[str]]  # the results, the lines of the report, and problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; return 0 if all expectations were met."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    with _server(options) as server:
        found, lines, problems = EXPERIMENTS[options.experiment](server, options)
    run = {"command": " ".join(["python -m loadtest", *given]), **_conditions()}
    (options.out / "results.json").write_text(json.dumps({**run, **found}, indent=1) + "\n", "utf-8")
    page = "\n".join([f"`{run['command']}`; {run['machine']}; commit {run['commit']}", "", *lines, ""])
    (options.out / "report.md").write_text(page, "utf-8")
    print(page)
    problems = list(problems)
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="output directory [%(default)s]")
    parser.add_argument("--seconds", type=float, help="duration of a phase (default: depends on the experiment)")
    parser.add_argument("--times", type=float, default=10.0, help="overload: rate relative to capacity [%(default)s]")
    parser.add_argument("--length", type=int, default=LONG, help="overload: factor of output lengths [%(default)s]")
    parser.add_argument("--runs", type=int, default=10, help="survive: number of runs [%(default)s]")
    parser.add_argument("--deaths", type=int, default=10, help="survive, restart: kills per run [%(default)s]")
    parser.add_argument("--every", type=float, default=30.0, help="replicas: seconds between kills [%(default)s]")
    parser.add_argument("--kinds", nargs="+", default=[], help="largest: kinds of calls (default: all)")
    parser.add_argument("--untimed", action="store_true", help="skip checks that depend on the machine's speed")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all further arguments: server options")
    return parser


def _server(options: argparse.Namespace) -> ServerProcess:
    log = options.out / "server.log"
    if options.experiment == "chaos":
        return ServerProcess(*OPTIONS, *options.serve, log=log, program=PROGRAM)
    own = INTERACTIVE if options.experiment == "overload" else survival.OPTIONS
    return ServerProcess(*own, *options.serve, log=log)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _conditions() -> dict[str, str]:
    """Return the machine and the commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor() or "?")
    machine = f"{name}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    command = [shutil.which("git") or "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        described = ""
    return {"machine": machine, "commit": described or "unknown"}


def _overload(server: ServerProcess, options: argparse.Namespace) -> Results:
    ask = partial(request, times=options.length)
    found = asyncio.run(overload(server, ask, options.times, options.seconds or 60.0, _progress))
    return asdict(found), found.lines(), found.problems(timed=not options.untimed)


def _chaos(server: ServerProcess, options: argparse.Namespace) -> Results:
    seconds = options.seconds or 300.0
    log = options.out / "replica.log"
    with ServerProcess(*OPTIONS, *options.serve, log=log, program=PROGRAM) as replica:
        found = asyncio.run(chaos(server, replica, seconds / 5, seconds, _progress))
    return asdict(found), chaos_lines(found), found.problems(timed=not options.untimed)


def _survive(server: ServerProcess, options: argparse.Namespace) -> Results:
    alone = asyncio.run(survival.undisturbed([server.address], server.http_address, _progress))
    runs = []
    for run in range(options.runs):
        runs.append(asyncio.run(survival.engine_deaths(server, alone, options.deaths, Random(run))))
        _progress(f"run {run}: {runs[-1].lines()[0]}")
    lines = [line for found in runs for line in found.lines()]
    return {"runs": lines}, lines, [problem for found in runs for problem in found.problems()]


def _replicas(server: ServerProcess, options: argparse.Namespace) -> Results:
    with ServerProcess(*survival.OPTIONS, *options.serve, log=options.out / "replica.log") as replica:
        both = (server, replica)
        alone = asyncio.run(survival.undisturbed([one.address for one in both], server.http_address, _progress))
        found = asyncio.run(survival.replica_deaths(both, alone, options.seconds or 300.0, options.every, Random(0)))
    return asdict(found), found.lines(), found.problems()


def _restart(server: ServerProcess, options: argparse.Namespace) -> Results:
    found = asyncio.run(survival.restarts(server, options.deaths, Random(0), _progress))
    return asdict(found), found.lines(), found.problems(timed=not options.untimed)


def _largest(server: ServerProcess, options: argparse.Namespace) -> Results:
    found = asyncio.run(largest(server, options.kinds, _progress))
    return asdict(found), found.lines(), found.problems(timed=not options.untimed)


EXPERIMENTS = {
    "overload": _overload,
    "chaos": _chaos,
    "survive": _survive,
    "replicas": _replicas,
    "restart": _restart,
    "largest": _largest,
}

if __name__ == "__main__":
    sys.exit(main())
