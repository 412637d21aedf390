"""One batch of requests through our engine, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from benchmarks.turns import Clock, Turn
from engine.engine import Engine
from engine.stats import StepStats
from engine.types import Request, SamplingParams, SpeculationMode, SpeculationParams

AUTO = "auto"
_salts = count()


def way(k: int | str, proposer: str | None = None, most: int = 8) -> SpeculationParams:
    """0 is plain decoding, another number that many drafts each time, `auto` as many as pay up to `most`."""
    if k == AUTO:
        return SpeculationParams(mode=SpeculationMode.AUTO, num_draft_tokens=most, proposer=proposer)
    if k == 0:
        return SpeculationParams(mode=SpeculationMode.OFF)
    return SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=int(k), proposer=proposer)


def run_turn(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    speculation: SpeculationParams,
    salt: str | None = None,
) -> Turn:
    """Greedy, to the last token; under a salt of its own nothing is cached from one turn to the next."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    salt = f"turn-{next(_salts)}" if salt is None else salt
    clock = Clock.of(len(prompts))
    for i, prompt in enumerate(prompts):
        name = str(i)
        request = Request(
            request_id=name, token_ids=prompt, sampling=sampling, speculation=speculation, cache_salt=f"{salt}-{i}"
        )
        engine.add(request)
    done: list[StepStats] = []
    while engine.has_work:
        output = engine.step()
        for event in output.events:
            clock.tokens[int(event.request_id)] += event.token_ids
        clock.tick()
        done.append(output.stats)
    return _counted(clock.turn(), done)


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
