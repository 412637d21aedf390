"""Load, fault and overload experiments: they send requests to a server, disturb it, and write a report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from loadtest.experiments import survival
from loadtest.experiments.chaos import OPTIONS, PROGRAM, chaos, chaos_lines
from loadtest.experiments.largest import largest
from loadtest.experiments.load import Load, load
from loadtest.experiments.overload import Ask, Server, overload
from loadtest.process import RemoteServer, ServerProcess
from loadtest.workload import LONG, read_prompts, request, request_of
from pilotfish.client import RequestFailedError
from pilotfish.server.commands.progress import Progress, Stopped, stoppable

# Interactive callers want a first token within a second, so a request waits in the queue for at most half of that.
INTERACTIVE = ("--max-queue-seconds", "0.5")
TOKEN = "PILOTFISH_TOKEN"  # noqa: S105  # the name of the variable
Results = tuple[dict[str, Any], list[str], Iterable[str]]  # the results, the lines of the report, and problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; return 0 if all expectations were met."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    try:
        _refuse(options)
        options.prompts = options.prompts and read_prompts(options.prompts)
        with stoppable(), Progress() as progress:
            progress(f"connecting to {options.address}" if options.address else "starting a server")
            with _server(options) as server:
                progress(options.experiment)
                results = EXPERIMENTS[options.experiment].run(server, options, progress)
    except Stopped as stop:
        if stop.report:
            print(stop.report)
        print(f"python -m loadtest {options.experiment}: stopped; {stop.kept}", file=sys.stderr)
        return stop.exit_code
    except (ValueError, OSError, RequestFailedError) as error:
        print(f"python -m loadtest {options.experiment}: {error}", file=sys.stderr)
        return 2
    return _report(options, given, *results)


def _report(
    options: argparse.Namespace, given: Sequence[str], found: dict[str, Any], lines: list[str], problems: Iterable[str]
) -> int:
    run = {"command": " ".join(["python -m loadtest", *given]), **_conditions()}
    options.out.mkdir(parents=True, exist_ok=True)
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
        prog="python -m loadtest",
        description=f"{__doc__}\n\nexperiments:\n"
        + "\n".join(f"  {name:<9} {one.about}" for name, one in EXPERIMENTS.items()),
        epilog="Each starts `pilotfish serve` with the embedded models on this machine, or with the options after "
        "--serve. Locust's users and\nits page are in loadtest/locustfile.py (pip install 'pilotfish[loadtest]'); "
        "`make loadtest` runs them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(name for name, one in EXPERIMENTS.items() if one.is_load)
    parser.add_argument("experiment", choices=EXPERIMENTS, metavar="EXPERIMENT")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help=f"{names}: gRPC address of a running server; {TOKEN}: its access token"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=f"{names}: prompts, one per line, or a .jsonl file of texts or objects with `prompt`",
    )
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="output directory [%(default)s]")
    parser.add_argument("--seconds", type=float, help="duration of a phase [the times above]")
    parser.add_argument("--callers", type=int, default=16, help="load: number of concurrent callers [%(default)s]")
    parser.add_argument("--times", type=float, default=10.0, help="overload: rate relative to capacity [%(default)s]")
    parser.add_argument("--length", type=int, default=LONG, help="overload: factor of output lengths [%(default)s]")
    parser.add_argument("--runs", type=int, default=10, help="survive: number of runs [%(default)s]")
    parser.add_argument("--deaths", type=int, default=10, help="survive, restart: kills per run [%(default)s]")
    parser.add_argument("--every", type=float, default=30.0, help="replicas: seconds between kills [%(default)s]")
    parser.add_argument("--kinds", nargs="+", default=[], help="largest: kinds of calls [all]")
    parser.add_argument("--untimed", action="store_true", help="skip checks that depend on the machine's speed")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all further arguments: server options")
    return parser


def _refuse(options: argparse.Namespace) -> None:
    """Raise ValueError for options that the experiment does not support."""
    if not EXPERIMENTS[options.experiment].is_load:
        if options.address:
            raise ValueError("--address is not supported: this experiment disturbs a server that it starts itself")
        if options.prompts:
            raise ValueError("--prompts is not supported: this experiment has requests of its own")
    if options.address and options.serve:
        raise ValueError("--address and --serve exclude each other: a running server has its options")


def _server(options: argparse.Namespace) -> Server:
    if options.address:
        return RemoteServer(options.address, os.environ.get(TOKEN))
    log = options.out / "server.log"
    if options.experiment == "chaos":
        return ServerProcess(*OPTIONS, *options.serve, log=log, program=PROGRAM)
    own = {"overload": INTERACTIVE, "load": ()}.get(options.experiment, survival.OPTIONS)
    return ServerProcess(*own, *options.serve, log=log)


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


def _ask(options: argparse.Namespace, times: int) -> Ask:
    return partial(request_of, options.prompts, times=times) if options.prompts else partial(request, times=times)


def _load(server: Server, options: argparse.Namespace, progress: Progress) -> Results:
    found = Load(options.callers)
    try:
        asyncio.run(load(server, _ask(options, 1), found, options.seconds or 60.0, progress))
    except Stopped as stop:
        if found.served:
            stop.report, stop.kept = "\n".join(found.lines()), "the report has the requests so far"
        raise
    return asdict(found), found.lines(), found.problems()


def _overload(server: Server, options: argparse.Namespace, progress: Progress) -> Results:
    found = asyncio.run(
        overload(server, _ask(options, options.length), options.times, options.seconds or 60.0, progress)
    )
    return asdict(found), found.lines(), found.problems(timed=not options.untimed)


def _chaos(server: ServerProcess, options: argparse.Namespace, progress: Progress) -> Results:
    seconds = options.seconds or 300.0
    log = options.out / "replica.log"
    with ServerProcess(*OPTIONS, *options.serve, log=log, program=PROGRAM) as replica:
        found = asyncio.run(chaos(server, replica, seconds / 5, seconds, progress))
    return asdict(found), chaos_lines(found), found.problems(timed=not options.untimed)


def _survive(server: ServerProcess, options: argparse.Namespace, progress: Progress) -> Results:
    alone = asyncio.run(survival.undisturbed([server.address], server.http_address, progress))
    runs = []
    progress.begin("killing engines", options.runs)
    for run in range(options.runs):
        runs.append(asyncio.run(survival.engine_deaths(server, alone, options.deaths, Random(run))))
        progress.note(f"run {run}: {runs[-1].lines()[0]}")
        progress.update(run + 1)
    lines = [line for found in runs for line in found.lines()]
    return {"runs": lines}, lines, [problem for found in runs for problem in found.problems()]


def _replicas(server: ServerProcess, options: argparse.Namespace, progress: Progress) -> Results:
    with ServerProcess(*survival.OPTIONS, *options.serve, log=options.out / "replica.log") as replica:
        both = (server, replica)
        alone = asyncio.run(survival.undisturbed([one.address for one in both], server.http_address, progress))
        seconds = options.seconds or 300.0
        progress.begin("killing replicas", seconds=seconds)
        found = asyncio.run(survival.replica_deaths(both, alone, seconds, options.every, Random(0)))
    return asdict(found), found.lines(), found.problems()


def _restart(server: ServerProcess, options: argparse.Namespace, progress: Progress) -> Results:
    found = asyncio.run(survival.restarts(server, options.deaths, Random(0), progress))
    return asdict(found), found.lines(), found.problems(timed=not options.untimed)


def _largest(server: ServerProcess, options: argparse.Namespace, progress: Progress) -> Results:
    found = asyncio.run(largest(server, options.kinds, progress))
    return asdict(found), found.lines(), found.problems(timed=not options.untimed)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment: what it does and how long it takes, and whether it only sends requests, to any server."""

    run: Callable[[Any, argparse.Namespace, Progress], Results]
    about: str
    is_load: bool = False


EXPERIMENTS = {
    "load": Experiment(_load, "callers who each send one request after another; one minute", is_load=True),
    "overload": Experiment(_overload, "ten times the server's measured capacity; three minutes", is_load=True),
    "chaos": Experiment(
        _chaos,
        "cancels, killed clients, stalled readers, deadlines and faults, while engines and one\n"
        "            of two replicas are killed; seven minutes",
    ),
    "survive": Experiment(
        _survive, "streams with every option while the engine is killed ten times, --runs times; a minute each"
    ),
    "replicas": Experiment(
        _replicas, "32 streams while one of two replicas is killed or rolled every 30 s; six minutes"
    ),
    "restart": Experiment(_restart, "the pause of a stream when the engine dies; a minute"),
    "largest": Experiment(
        _largest, "calls of maximum size, of more than fifty kinds, ten of each kind at once; two minutes"
    ),
}

if __name__ == "__main__":
    sys.exit(main())
