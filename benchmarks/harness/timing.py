"""Batches of requests through our engine, in this process: one alone, or several engines abreast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from benchmarks.harness.turns import Clock, Turn
from engine.engine import Engine
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from engine.stats import StepStats
from engine.types import Request

AUTO = "auto"
_salts = count()


def way(k: int | str, proposer: str | None = None, most: int = 8) -> SpeculationParams:
    """0 is plain decoding, another number that many drafts each time, `auto` as many as pay up to `most`."""
    if k == AUTO:
        return SpeculationParams(mode=SpeculationMode.AUTO, num_draft_tokens=most, proposer=proposer)
    if k == 0:
        return SpeculationParams(mode=SpeculationMode.OFF)
    return SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=int(k), proposer=proposer)


class Batch:
    """Some requests on their way through our engine, a step at a time. Its seconds are those of its own steps.

    Greedy unless `sampling` says otherwise, to the last token; under a salt of its own nothing is cached from one batch
    to the next.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        tokens: int,
        speculation: SpeculationParams,
        salt: str | None = None,
        sampling: SamplingParams | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds, self.num_tokens, self._now = 0.0, tokens, clock
        self._clock = Clock.of(len(prompts), lambda: self.seconds)
        self._engine, self._done = engine, list[StepStats]()
        sampling = replace(sampling or SamplingParams(), max_tokens=tokens, ignore_eos=True)
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
        """Every request has its last token."""
        return not self._engine.has_work

    def step(self) -> None:
        """One step of the engine."""
        with self._counting():
            output = self._engine.step()
            for event in output.events:
                self._clock.tokens[int(event.request_id)] += event.token_ids
        self._clock.tick()
        self._done.append(output.stats)

    def turn(self) -> Turn:
        """All of it; whoever else used the processor meanwhile did so in the turns beside it too."""
        return _counted(self._clock.turn(), self._done)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds += self._now() - start


def abreast(batches: Mapping[str, Batch]) -> dict[str, Turn]:
    """Batches of several engines at the same time: a step of whoever has used least, and so on until all are over.

    Turns one after another are seconds apart, in which a shared machine may change its speed by a half; the steps of
    engines that go abreast are milliseconds apart.
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
    salt: str | None = None,
) -> Turn:
    """A batch alone."""
    return abreast({"": Batch(engine, prompts, tokens, speculation, salt)})[""]


def _counted(turn: Turn, steps: Sequence[StepStats]) -> Turn:
    """With what the steps say of themselves."""
    decoding = [s for s in steps if [forward.kind for forward in s.forwards if forward.kind != "draft"] == ["verify"]]
    return replace(
        turn,
        verify_seconds=[sum(s.phase_seconds.values()) - s.phase_seconds["propose"] for s in decoding],
        draft_seconds=[s.phase_seconds["propose"] for s in decoding],
        drafted=sum(s.drafted for s in steps),
        rounds=sum(s.rounds for s in steps),
        accepted=sum(s.accepted for s in steps),
    )
