"""A simulated server without a model: the real scheduler, control, queue and engine step, on a virtual clock.

The cost of a pass comes from a cost table, the acceptance of drafts is random, and the clock is a number. All code that
makes decisions is the code of the real server.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from benchmarks.capacity.costs import CostTable
from engine.config import EngineConfig
from engine.control.adaptive import AdaptiveK
from engine.engine import Engine
from engine.kv.pages import PagePool
from engine.params import SamplingParams
from engine.proposers import Proposal, Proposers
from engine.proposers.none import NoProposer
from engine.request.intake import Limits
from engine.sampling.verification import VerifyInput, VerifyOutput
from engine.scheduler import Scheduler, StepPlan
from engine.stats import Stopwatch
from engine.target_pass import Verified
from engine.types import Request, Sequence
from server.errors import QueueFull
from server.estimates import Estimates
from server.queue import AdmissionQueue
from server.streams.output import Timeline

PAGE, MAX_LEN, VOCAB = 32, 1024, 2
TOKEN = 1


@dataclass(slots=True)
class VirtualClock:
    """A clock that advances only when its value is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _Drafts:
    """A proposer with costs from the table; whether its drafts are accepted is drawn during verification."""

    uses_draft_kv = shares_draft_kv = False

    def __init__(self, costs: CostTable, clock: VirtualClock) -> None:
        self._costs, self._clock = costs, clock

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Return as many drafts as requested."""
        self._clock.now += self._costs.draft_seconds(len(sequences), sum(k_each))
        return Proposal.certain([(TOKEN,) * k for k in k_each])


class _Passes:
    """A replacement for the target's passes."""

    def __init__(self, costs: CostTable, clock: VirtualClock, random: Random) -> None:
        self._costs, self._clock, self._random = costs, clock, random

    def run(self, plan: StepPlan, proposal: Proposal, watch: Stopwatch) -> Verified:
        """Feed all sequences and advance the clock by the cost of the pass."""
        with watch.phase("forward"):
            rows = sum(len(work.span) for work in plan.works) + sum(map(len, proposal.tokens))
            contexts = sum(len(work.sequence.tokens) for work in plan.works)
            self._clock.now += self._costs.target_seconds(len(plan.works), rows, contexts)
            fed = []
            for work, drafts in zip(plan.works, proposal.tokens, strict=True):
                work.sequence.target.advance(work.span.stop + len(drafts))
                if work.reaches_end:
                    fed.append(VerifyInput(work.sequence, drafts))
        return Verified(proposal, fed, [self._outcome(len(one.drafts)) for one in fed])

    def _outcome(self, num_draft: int) -> VerifyOutput:
        accepted = 0
        while accepted < num_draft and self._random.random() < self._costs.acceptance:
            accepted += 1
        return VerifyOutput((TOKEN,) * (accepted + 1), accepted)


@dataclass(slots=True)
class Served:
    """One admitted request, in seconds of the virtual clock."""

    arrived: float
    prompt: int
    tokens: int  # the output length
    timeline: Timeline = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.arrived)


class SimulatedReplica:
    """One server. Arrivals are offered in order of time, and the server steps while it has work before the next one."""

    def __init__(self, costs: CostTable, config: EngineConfig, queue: AdmissionQueue, random: Random) -> None:
        self.clock, self._costs, self._config = VirtualClock(), costs, config
        self.queue, self.estimates = queue, Estimates()
        self.served: list[Served] = []  # completed requests
        self.refused = 0
        self.busy = 0.0
        self._live: dict[str, Served] = {}
        self._number = 0
        self.engine = _engine(costs, config, self.clock, random)

    @property
    def load(self) -> int:
        """Return the number of running and waiting requests."""
        return len(self._live)

    def offer(self, arrived: float, prompt: int, tokens: int) -> bool:
        """Offer a request that arrives now, as the driver would; return whether it was admitted."""
        self.run_until(arrived)
        self.clock.now = max(self.clock.now, arrived)
        self._number += 1
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        name = str(self._number)
        request = Request(request_id=name, token_ids=(0,) * prompt, sampling=sampling, cache_salt=name)
        try:
            self.queue.push(request, prompt + tokens, arrived, self._outlook())
        except QueueFull:
            self.refused += 1
            return False
        self._live[name] = Served(arrived, prompt, tokens)
        return True

    def _outlook(self) -> Any:
        running = [s for s in self._live.values() if s.timeline.started is not None]
        left = sorted(self.estimates.left(s.done, s.tokens) for s in running)
        free = self._config.max_batch_size - self.engine.num_running if self.engine.has_room else 0
        return self.estimates.outlook(len(self.queue) - free, left)

    def run_until(self, moment: float) -> None:
        """Step until this moment, or until there is no work."""
        while self.clock.now < moment and (self.queue or self.engine.has_work):
            start = self.clock.now
            self._step()
            self.busy += self.clock.now - start

    def _step(self) -> None:
        while self.queue and self.engine.has_room:
            request = self.queue.pop()
            self._live[request.request_id].timeline.started = self.clock.now
            self.engine.add(request)
        output = self.engine.step()
        self.clock.now += self._costs.between(len(output.events))
        self.estimates.observe(output.stats)
        for event in output.events:
            self._take(event.request_id, len(event.token_ids), is_over=event.finished is not None)

    def _take(self, name: str, tokens: int, *, is_over: bool) -> None:
        served, now = self._live[name], self.clock.now
        served.done += tokens
        if tokens:
            served.timeline.first_token = served.timeline.first_token or now
            served.timeline.last_token = now
        if is_over:
            served.timeline.ended = now
            self.estimates.end(served.timeline)
            self.estimates.end_output(served.done, served.tokens)
            self.served.append(self._live.pop(name))


def _engine(costs: CostTable, config: EngineConfig, clock: VirtualClock, random: Random) -> Engine:
    proposers = Proposers({"none": NoProposer(), "ngram": _Drafts(costs, clock)}, VOCAB)
    pages = config.max_batch_size * -(-MAX_LEN // PAGE)
    pool = PagePool(pages, PAGE, prefix_cache=False)
    scheduler = Scheduler(pool, config.max_batch_size, config.max_batch_tokens, control=AdaptiveK())
    engine = Engine(config, Limits(VOCAB, MAX_LEN), cast("Any", None), proposers, scheduler, clock)
    engine._target_pass = cast("Any", _Passes(costs, clock, random))  # noqa: SLF001  # in place of a model
    return engine
