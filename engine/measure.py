"""Turns what a step did into its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TypedDict

from engine.judge import Drafted, Outcome
from engine.proposers import Proposal
from engine.scheduler import Scheduler, StepPlan
from engine.stats import Forward, StepStats
from engine.types import TokenEvent


class _Load(TypedDict):
    running: int
    waiting: int
    kv_usage: float


def idle(scheduler: Scheduler) -> StepStats:
    """A step in which nobody took part."""
    return StepStats(**_load(scheduler))


def measure(
    plan: StepPlan,
    proposal: Proposal,
    drafted: Seq[Drafted],
    outcomes: Seq[Outcome],
    events: Iterable[TokenEvent],
    phase_seconds: Mapping[str, float],
    draft_failures: int,
    scheduler: Scheduler,
) -> StepStats:
    """Everything that a step shows to an operator."""
    rounds = [(len(d.drafts), o.num_accepted) for d, o in zip(drafted, outcomes, strict=True) if d.drafts]
    prefilled = sum(len(w.span) for w in plan.works if w.is_prefill)
    return StepStats(
        forwards=(*proposal.forwards, *_target_forwards(plan, proposal)),
        phase_seconds=phase_seconds,
        rounds=len(rounds),
        drafted=sum(num_draft for num_draft, _ in rounds),
        accepted_per_position=_per_position(rounds),
        generated_tokens=sum(len(event.token_ids) for event in events),
        prompt_tokens=prefilled,
        preempted=plan.num_preempted,
        draft_failures=draft_failures,
        **_load(scheduler),
    )


def _target_forwards(plan: StepPlan, proposal: Proposal) -> Iterator[Forward]:
    """The target's one pass, as verification of some sequences and prefill of others."""
    works = list(zip(plan.works, proposal.tokens, strict=True))
    verified = [len(w.span) + len(drafts) for w, drafts in works if not w.is_prefill]
    prefilled = [len(w.span) for w, _ in works if w.is_prefill]
    if verified:
        yield Forward("verify", len(verified), sum(verified))
    if prefilled:
        yield Forward("prefill", len(prefilled), sum(prefilled))


def _per_position(rounds: Seq[tuple[int, int]]) -> tuple[int, ...]:
    """(K, accepted) of each round -> how many kept draft 0, 1, ...; [(3, 2), (2, 0)] -> (1, 1, 0)."""
    deepest = max((num_draft for num_draft, _ in rounds), default=0)
    return tuple(sum(accepted > position for _, accepted in rounds) for position in range(deepest))


def _load(scheduler: Scheduler) -> _Load:
    pool = scheduler.target
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_usage": 1 - pool.num_free / pool.num_pages,
    }
