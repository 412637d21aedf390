"""Load a server on this machine, started here or given by its address, and write the results.

python -m loadtest curve       callers and rates up to twice the server's capacity; plots
python -m loadtest overload    ten times the server's capacity, for a minute
python -m loadtest chaos       cancels, killed clients, stalled readers, deadlines and faults, while engines and one of
                               two replicas are killed, for five minutes
python -m loadtest survive     32 streams of every option while the engine is killed at ten random moments, --runs times
python -m loadtest replicas    32 streams while one of two replicas is killed or rolled every 30 s, for five minutes
python -m loadtest restart     the pause that a reader sees when the engine dies
python -m loadtest starts      --runs cold starts with an EAGLE head, each of which must accept what the first accepts
python -m loadtest largest     calls of the largest size, of more than fifty kinds, ten of a kind at once
python -m loadtest locust      Locust's users, for a minute, none of whom may fail; needs the extra loadtest

The load is a multiple of the capacity that is measured on this machine, so that no machine is too slow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from loadtest import plots, report
from loadtest.experiments import survival
from loadtest.experiments.chaos import OPTIONS, PROGRAM, chaos, chaos_lines
from loadtest.experiments.curve import SHARES, curve
from loadtest.experiments.largest import largest
from loadtest.experiments.overload import full_rate, overload
from loadtest.experiments.restart import restarts
from loadtest.experiments.starts import CACHE, HEAD, cold_starts
from loadtest.phases import LoadTarget, Phase
from loadtest.process import SCREEN, ServerProcess
from loadtest.swarm import processes
from loadtest.workload import WORKLOADS

AT_A_SCREEN = ("curve", "overload")  # experiments whose callers expect a first token within a second


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; return 0 if all expectations were met."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    told = report.conditions(" ".join(["python -m loadtest", *given]))
    with _server(options) as server:
        lines, problems = EXPERIMENTS[options.experiment](server, options, told)
    page = "\n".join([f"`{told['command']}`; {told['machine']}; commit {told['commit']}", "", *lines, ""])
    (options.out / "report.md").write_text(page, "utf-8")
    print(page)
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="folder of the results [%(default)s]")
    parser.add_argument("--seconds", type=float, help="how long a stretch takes; default: as the experiment has it")
    parser.add_argument("--workload", choices=WORKLOADS, default="long_outputs", help="what is asked [%(default)s]")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="curve: rates, in terms of capacity")
    parser.add_argument("--times", type=float, default=10.0, help="overload: rate, in terms of capacity [%(default)s]")
    parser.add_argument("--users", type=int, help="locust; default 100, or as many as wait for seconds at most")
    parser.add_argument("--workers", type=int, default=2, help="locust: processes that hold them [%(default)s]")
    parser.add_argument("--scenario", default="steady", help="locust: steady, ramp, spike, or a workload [%(default)s]")
    parser.add_argument("--runs", type=int, default=10, help="survive, starts: runs [%(default)s]")
    parser.add_argument(
        "--deaths", type=int, default=10, help="survive, restart: deaths of the engine in a run [%(default)s]"
    )
    parser.add_argument("--every", type=float, default=30.0, help="replicas: seconds between two deaths [%(default)s]")
    parser.add_argument("--kinds", nargs="+", default=[], help="largest: these kinds; default all")
    parser.add_argument("--untimed", action="store_true", help="judge nothing that depends on the machine's speed")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all that follows goes to the server")
    return parser


def _server(options: argparse.Namespace) -> ServerProcess:
    log = options.out / "server.log"
    if options.experiment == "chaos":
        return ServerProcess(*OPTIONS, *options.serve, log=log, program=PROGRAM)
    if options.experiment == "starts":
        cache = {"PILOTFISH_CACHE": str(options.out / CACHE)}
        return ServerProcess(*HEAD, *options.serve, log=log, environment=cache)
    if options.experiment in ("survive", "replicas", "restart", "largest"):
        return ServerProcess(*survival.OPTIONS, *options.serve, log=log)
    if options.experiment in AT_A_SCREEN:
        return ServerProcess(*SCREEN, *options.serve, log=log)
    return ServerProcess(*options.serve, log=log)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _save(options: argparse.Namespace, told: dict[str, str], **results: Any) -> None:
    (options.out / "results.json").write_text(json.dumps({**told, **results}, indent=1) + "\n", "utf-8")


def _write(options: argparse.Namespace, told: dict[str, str], phases: Sequence[Phase], site: LoadTarget) -> list[str]:
    report.write(options.out, told, phases, site.samples)
    return report.table(phases)


def _curve(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    site = LoadTarget(server, WORKLOADS[options.workload])
    found = asyncio.run(curve(site, options.seconds or 20.0, options.shares, _tell))
    lines = _write(options, told, found.phases, site)
    if find_spec("matplotlib"):
        for path in plots.curves(options.out, found.phases, site.objective):
            _tell(str(path))
    verdict = (
        f"Capacity {found.capacity:.1f} requests/s; everybody served up to {found.saturation:.1f}/s; goodput at the "
        f"highest rate {found.kept:.0%} of the best."
    )
    return [verdict, "", *lines], list(found.problems(timed=not options.untimed))


def _overload(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    site = LoadTarget(server, WORKLOADS[options.workload])
    found = asyncio.run(overload(site, options.times, options.seconds or 60.0, _tell))
    lines = _write(options, told, found.phases, site)
    verdict = (
        f"Time to first token p99 {found.waiting:.2f} times that at capacity; requests served per second "
        f"{found.kept:.0%} of those at capacity; memory {found.growth:+.1%}."
    )
    return [verdict, "", *lines], list(found.problems(timed=not options.untimed))


def _chaos(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    seconds = options.seconds or 300.0
    log = options.out / "replica.log"
    with ServerProcess(*OPTIONS, *options.serve, log=log, program=PROGRAM) as replica:
        found = asyncio.run(chaos(server, replica, seconds / 5, seconds, _tell))
    lines = chaos_lines(found)
    _save(options, told, **asdict(found))
    return lines, list(found.problems(timed=not options.untimed))


def _survive(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    alone = asyncio.run(survival.undisturbed([server.address], server.http_address, _tell))
    lines, problems = [], []
    for run in range(options.runs):
        found = asyncio.run(survival.engine_deaths(server, alone, options.deaths, Random(run)))
        _tell(f"run {run}: {found.lines()[0]}")
        lines += found.lines()
        problems += list(found.problems())
    _save(options, told, runs=lines)
    return lines, problems


def _replicas(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    with ServerProcess(*survival.OPTIONS, *options.serve, log=options.out / "replica.log") as replica:
        both = (server, replica)
        alone = asyncio.run(survival.undisturbed([one.address for one in both], server.http_address, _tell))
        found = asyncio.run(survival.replica_deaths(both, alone, options.seconds or 300.0, options.every, Random(0)))
    _save(options, told, **asdict(found))
    return found.lines(), list(found.problems())


def _restart(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    found = asyncio.run(restarts(server, options.deaths, Random(0), _tell))
    _save(options, told, **asdict(found))
    return found.lines(), list(found.problems(timed=not options.untimed))


def _starts(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    found = cold_starts(server, options.out / CACHE, options.runs, _tell)
    _save(options, told, **asdict(found))
    return found.lines(), list(found.problems())


def _largest(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    found = asyncio.run(largest(server, options.kinds, _tell))
    _save(options, told, **asdict(found))
    return found.lines(), list(found.problems(timed=not options.untimed))


def _locust(server: ServerProcess, options: argparse.Namespace, told: dict[str, str]) -> tuple[list[str], list[str]]:
    seconds = options.seconds or 60.0
    wanted = processes.Swarm(options.users or 0, seconds, options.workers, options.scenario)
    if not wanted.users:
        places, rate = asyncio.run(_capacity(server, options.scenario, seconds / 10))
        wanted = replace(wanted, users=processes.bearable(places, rate), coming=processes.coming(places, rate))
    _tell(f"{wanted.users} users for {wanted.seconds:g} s, {wanted.scenario}")
    rows = wanted.run(server, options.out)
    _save(options, told, rows=rows)
    failed = processes.failures(rows)
    return processes.lines(rows), [f"{failed} calls failed"] if failed else []


async def _capacity(server: ServerProcess, scenario: str, seconds: float) -> tuple[int, float]:
    """Return the size of the server's batch, and how many requests end per second while the batch is full."""
    site = LoadTarget(server, WORKLOADS.get(scenario, WORKLOADS["steady"]))
    places = await site.places()
    _tell(f"capacity: {places} callers for {seconds:g} s")
    await site.closed("capacity", places, seconds)
    rate = full_rate(site.samples["capacity"])
    _tell(f"capacity: {rate:.1f} requests/s")
    return places, rate


EXPERIMENTS = {
    "curve": _curve,
    "overload": _overload,
    "chaos": _chaos,
    "survive": _survive,
    "replicas": _replicas,
    "restart": _restart,
    "starts": _starts,
    "largest": _largest,
    "locust": _locust,
}

if __name__ == "__main__":
    sys.exit(main())
