"""Predict the performance of servers under load from the costs of their steps, and compare with a real server.

python -m benchmarks.capacity.simulate check    measure costs, predict, measure through gRPC, compare; stores the costs
python -m benchmarks.capacity.simulate scale    from stored costs: queue bounds, batch sizes, replicas, load balancing
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

from benchmarks.capacity.costs import CostTable, observe
from benchmarks.capacity.replica import Served, SimulatedReplica
from benchmarks.harness.machine import machine
from engine.config import EngineConfig
from loadtest.arrivals import Arrivals
from loadtest.phases import SEED, LoadTarget, Phase
from loadtest.process import SCREEN, ServerProcess
from loadtest.samples import levels
from loadtest.workload import Ask, long_outputs
from server.config import ServerConfig
from server.model import ServedModel
from server.queue import AdmissionQueue

if TYPE_CHECKING:
    from engine.engine import Engine

COSTS = Path("docs/benchmarks/service/costs.json")
NEAR = 0.15  # maximum relative error of a prediction
_CALLERS = (16, 64)
_SERVED = ServerConfig.load(["--threads", "1", *SCREEN])


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request as the engine sees it: its arrival in seconds, and its lengths in tokens."""

    moment: float
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted results of many requests."""

    served: Sequence[Served]
    refused: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Return tokens per second of all replicas."""
        return sum(s.done for s in self.served) / self.seconds

    @property
    def per_second(self) -> float:
        """Return requests served per second."""
        return len(self.served) / self.seconds

    @property
    def refused_share(self) -> float:
        """Return the share of refused requests."""
        return self.refused / max(1, self.refused + len(self.served))

    @property
    def first_token(self) -> dict[str, float]:
        """Return percentiles of the time to first token."""
        return levels(s.timeline.first_token - s.arrived for s in self.served if s.timeline.first_token is not None)

    @property
    def total(self) -> float:
        """Return mean seconds from arrival to end."""
        return statistics.fmean(s.timeline.ended - s.arrived for s in self.served if s.timeline.ended is not None)

    @property
    def per_token(self) -> float:
        """Return median seconds per token after the first."""
        return statistics.median(
            (s.timeline.last_token - s.timeline.first_token) / (s.done - 1)
            for s in self.served
            if s.done > 1 and s.timeline.last_token is not None and s.timeline.first_token is not None
        )


Route = Callable[[Sequence[SimulatedReplica], int, Random], SimulatedReplica]


def at_random(replicas: Sequence[SimulatedReplica], _number: int, random: Random) -> SimulatedReplica:
    """Choose a replica at random, which is the effect of many callers with a round robin each."""
    return random.choice(replicas)


def in_turn(replicas: Sequence[SimulatedReplica], number: int, _random: Random) -> SimulatedReplica:
    """Choose replicas in turn, as one caller's round robin does."""
    return replicas[number % len(replicas)]


def better_of_two(replicas: Sequence[SimulatedReplica], _number: int, random: Random) -> SimulatedReplica:
    """Draw two replicas at random and choose the one with fewer requests."""
    return min(random.choice(replicas), random.choice(replicas), key=lambda replica: replica.load)


def forecast(
    costs: CostTable,
    asked: Sequence[SimulatedRequest],
    *,
    replicas: int = 1,
    route: Route = at_random,
    queue_seconds: float = _SERVED.max_queue_seconds,
    batch: int = _SERVED.max_batch_size,
    num_draft: int = _SERVED.num_draft_tokens,
) -> Forecast:
    """Offer all requests in order to the simulated servers, and let the servers finish."""
    tokens = max(batch, _SERVED.max_batch_tokens)
    config = EngineConfig.model_validate(
        {"target": "none", "max_batch_size": batch, "max_batch_tokens": tokens, "num_draft_tokens": num_draft}
    )
    random = Random(SEED)  # noqa: S311
    servers = [
        SimulatedReplica(
            costs, config, AdmissionQueue(_SERVED.max_queue_requests, _SERVED.max_queue_tokens, queue_seconds), random
        )
        for _ in range(replicas)
    ]
    for number, one in enumerate(asked):
        chosen = route(servers, number, random)
        for server in servers if route is better_of_two else ():
            if server.clock.now < one.moment:
                server.run_until(one.moment)
        chosen.offer(one.moment, one.prompt, one.tokens)
    end = asked[-1].moment
    for server in servers:
        server.run_until(end + 1000)
    done = [served for server in servers for served in server.served]
    return Forecast(done, sum(s.refused for s in servers), max([end, *(s.timeline.ended or 0 for s in done)]))


def drawn(rate: float, seconds: float, prompts: Sequence[int]) -> list[SimulatedRequest]:
    """Draw requests of the workload `long_outputs`, with prompt lengths drawn from real ones."""
    random = Random(SEED)  # noqa: S311
    moments = list(Arrivals(rate).times(seconds, random))
    return [
        SimulatedRequest(moment, random.choice(prompts), long_outputs(random).options["max_tokens"] or 0)
        for moment in moments
    ]


# ----------------------------------------------------------------------------------------------- costs, and the check


def measure_costs(model: ServedModel, seconds: float) -> CostTable:
    """Measure the costs of the engine alone, on prompts of the workload."""
    assert model.codec is not None, "the embedded pair has a tokenizer"
    random = Random(SEED)  # noqa: S311
    prompts = [tuple(model.codec.encode(long_outputs(random).prompt * 3)) for _ in range(64)]
    return CostTable.fit(observe(cast("Engine", model.engine), prompts, seconds))


async def with_network(costs: CostTable, site: LoadTarget, seconds: float) -> CostTable:
    """Add the server's overheads to the costs, from its own metrics with few callers and with many."""
    gaps = []
    for callers in _CALLERS:
        before = await asyncio.to_thread(site.server.metrics)
        phase = await site.closed(f"{callers} callers", callers, seconds)
        added = (await asyncio.to_thread(site.server.metrics)).since(before)
        steps, busy = (
            added.value("step_duration_seconds_count", phase="forward"),
            added.total("step_duration_seconds_sum"),
        )
        gaps.append(((phase.summary.seconds - busy) / steps, phase.account.batch_size))
    (first, few), (second, many) = gaps
    each = max(0.0, (second - first) / (many - few))
    return replace(costs, token_overhead=each, step_overhead=max(0.0, first - few * each))


def asked_of(site_rate: float, seconds: float, encode: Callable[[str], Sequence[int]]) -> list[SimulatedRequest]:
    """Return exactly the requests that `LoadTarget.open` sends at this rate."""
    random = Random(SEED)  # noqa: S311
    moments = list(Arrivals(site_rate).times(seconds, random))
    asks: list[Ask] = [long_outputs(random) for _ in moments]
    pairs = zip(moments, asks, strict=True)
    return [SimulatedRequest(moment, len(encode(ask.prompt)), ask.options["max_tokens"] or 0) for moment, ask in pairs]


def compare(phase: Phase, found: Forecast) -> Iterator[tuple[str, float, float]]:
    """Yield (name, measured, predicted)."""
    summary = phase.summary
    yield "tokens/s", summary.tokens_per_second, found.tokens_per_second
    yield "requests served/s", summary.served / summary.seconds, found.per_second
    yield (
        "whole request, median s",
        summary.total["p50"],
        levels((s.timeline.ended or 0) - s.arrived for s in found.served)["p50"],
    )
    yield "per token, median ms", 1000 * summary.time_per_token["p50"], 1000 * found.per_token
    yield "first token, median s", summary.time_to_first_token["p50"], found.first_token["p50"]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def check(options: argparse.Namespace) -> None:
    """Measure costs, predict, measure the real server, and compare."""
    model = ServedModel.load(_SERVED.engine(), lambda stage: print(stage, file=sys.stderr))
    assert model.codec is not None, "the embedded pair has a tokenizer"
    costs = measure_costs(model, options.seconds)
    lines = ["| load | | measured | predicted | off by |", "|---|---|---|---|---|"]
    with ServerProcess(*SCREEN, log=Path("build/simulate.log")) as server:
        site = LoadTarget(server, long_outputs)
        costs = asyncio.run(with_network(costs, site, options.seconds))
        for rate in options.rates:
            phase = asyncio.run(site.open(f"{rate:g}/s", Arrivals(rate), options.seconds * 2))
            found = forecast(costs, asked_of(rate, options.seconds * 2, model.codec.encode))
            for name, measured, predicted in compare(phase, found):
                off = predicted / measured - 1
                lines.append(
                    f"| {rate:g} requests/s | {name} | {_short(measured)} | {_short(predicted)} | {off:+.0%} |"
                )
    COSTS.parent.mkdir(parents=True, exist_ok=True)
    costs.save(COSTS)
    print("\n".join(["; ".join(machine().values()), "", *lines]))


# ------------------------------------------------------------------------------------------------------------- scale

_PROMPTS = (20, 35, 50, 65, 90, 150)  # tokens, similar to the workload's prompts


def scale(options: argparse.Namespace) -> None:
    """Print tables of predictions from the stored costs."""
    costs = CostTable.load(COSTS)
    full = forecast(costs, drawn(60.0, options.seconds, _PROMPTS))
    capacity = full.per_second
    print(f"one server, overloaded: {capacity:.1f} requests/s, {full.tokens_per_second:.0f} tokens/s\n")
    print("| max_queue_seconds | load | served/s | refused | first token p50 / p99, s |\n|---|---|---|---|---|")
    for seconds in (0.0, 0.25, 0.5, 1.0, 2.0, 5.0):
        for load in (0.9, 1.1, 3.0):
            _row(
                f"{seconds:g} | {load:g}",
                forecast(costs, drawn(load * capacity, options.seconds, _PROMPTS), queue_seconds=seconds),
            )
    print("\n| max_batch_size | load | served/s | refused | first token p50 / p99, s | tokens/s | per token p50, ms |")
    print("|---|---|---|---|---|---|---|")
    for batch in (8, 16, 32, 64, 128):
        found = forecast(costs, drawn(2 * capacity, options.seconds, _PROMPTS), batch=batch)
        _row(f"{batch} | 2", found, f" {found.tokens_per_second:.0f} | {1000 * found.per_token:.1f} |")
    print("\n| replicas | route, at 0.9 | served/s | refused | first token p50 / p99, s |\n|---|---|---|---|---|")
    for replicas in options.replicas:
        asked = drawn(0.9 * capacity * replicas, options.seconds, _PROMPTS)
        for route in (in_turn, at_random, better_of_two):
            name = route.__name__.replace("_", " ")
            _row(f"{replicas} | {name}", forecast(costs, asked, replicas=replicas, route=route))


def _row(name: str, found: Forecast, more: str = "") -> None:
    first = found.first_token
    waits = f"{first['p50']:.2f} / {first['p99']:.2f}"
    print(f"| {name} | {found.per_second:.1f} | {found.refused_share:.1%} | {waits} |{more}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("check", "scale"))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement, or of virtual time")
    parser.add_argument("--rates", type=float, nargs="+", default=(12.0, 18.0, 40.0), help="check: requests per second")
    parser.add_argument("--replicas", type=int, nargs="+", default=(1, 8, 64), help="scale")
    options = parser.parse_args(arguments)
    {"check": check, "scale": scale}[options.what](options)


if __name__ == "__main__":
    main()
