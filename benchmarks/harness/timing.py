"""Batches of requests through our engine, in this process: one batch alone, or several engines concurrently."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from benchmarks.harness.turns import Clock, Turn
from pilotfish.engine.engine import Engine
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.stats import StepStats
from pilotfish.engine.types import Request

AUTO = "auto"
_salts = count()


def way(k: int | str, proposer: str | None = None) -> SpeculationParams:
    """Return parameters for `k`: 0 is plain decoding, a number is a fixed K, `auto` drafts at most eight."""
    if k == AUTO:
        return SpeculationParams(mode=SpeculationMode.AUTO, num_draft_tokens=8, proposer=proposer)
    if k == 0:
        return SpeculationParams(mode=SpeculationMode.OFF)
    return SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=int(k), proposer=proposer)


class Batch:
    """A batch of requests in our engine, run step by step. Its seconds count only its own steps.

    Decoding is greedy and ignores end tokens. Each batch has its own salt by default, so that nothing is cached between
    batches.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        tokens: int,
        speculation: SpeculationParams,
        salt: str | None = None,
    ) -> None:
        self.seconds, self.num_tokens = 0.0, tokens
        self._clock = Clock.of(len(prompts), lambda: self.seconds)
        self._engine, self._done = engine, list[StepStats]()
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        salt = f"turn-{next(_salts)}" if salt is None else salt
        with self._counting():
            for i, prompt in enumerate(prompts):
                request = Request(
                    request_id=str(i),
                    token_ids=prompt,
                    sampling=sampling,
                    speculation=speculation,
                    cache_salt=f"{salt}-{i}",
                )
                engine.add(request)

    @property
    def is_over(self) -> bool:
        """Return whether every request has its last token."""
        return not self._engine.has_work

    def step(self) -> None:
        """Run one step of the engine."""
        with self._counting():
            output = self._engine.step()
            for event in output.events:
                self._clock.tokens[int(event.request_id)] += event.token_ids
        self._clock.tick()
        assert output.stats is not None, "it is the output of a step"
        self._done.append(output.stats)

    def turn(self) -> Turn:
        """Return the measurements. Processor use by other programs slows all concurrent batches alike."""
        return _counted(self._clock.turn(), self._done)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def abreast(batches: Mapping[str, Batch]) -> dict[str, Turn]:
    """Run batches of several engines concurrently: the next step is always of the batch with the least time so far.

    Turns that run one after another are seconds apart, and in that time the speed of a shared machine may change by
    half. The steps of concurrent engines are only milliseconds apart.
    """
    left = dict(batches)
    turns: dict[str, Turn] = {}
    while left:
        name = min(left, key=lambda name: left[name].seconds)
        left[name].step()
        if left[name].is_over:
            turns[name] = left.pop(name).turn()
    return {name: turns[name] for name in batches}


def run_turn(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    speculation: SpeculationParams,
) -> Turn:
    """Run one batch alone."""
    return abreast({"": Batch(engine, prompts, tokens, speculation)})[""]


def _counted(turn: Turn, steps: Sequence[StepStats]) -> Turn:
    """Add the statistics of the steps."""
    decoding = [s for s in steps if [forward.kind for forward in s.forwards if forward.kind != "draft"] == ["verify"]]
    return replace(
        turn,
        verify_seconds=[sum(s.phase_seconds.values()) - s.phase_seconds["propose"] for s in decoding],
        drafted=sum(s.drafted for s in steps),
        rounds=sum(s.rounds for s in steps),
        accepted=sum(s.accepted for s in steps),
    )
