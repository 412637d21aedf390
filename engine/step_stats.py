"""What a step did, as numbers: statistics for operators, feedback for control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

from engine.control.step_time import StepFeedback
from engine.device_loop.results import RoundResult
from engine.native import threads_in_use
from engine.proposers import Proposal
from engine.sampling.verification import VerifyOutput
from engine.scheduler import Scheduler, StepPlan, Work
from engine.stats import Forward, StepStats
from engine.target_pass import Verified
from engine.types import TokenEvent


def feedback_of(
    plan: StepPlan, proposal: Proposal, outcomes: Seq[VerifyOutput], phase_seconds: Mapping[str, float]
) -> StepFeedback:
    """Feedback for control: the part of a step that fed newest tokens and drafts."""
    decided = zip((work for work in plan.works if work.reaches_end), outcomes, strict=True)
    steady = [(work, outcome) for work, outcome in decided if _feeds_newest_only(work)]
    draft_seconds = phase_seconds["propose"]
    return StepFeedback(
        sequences=[work.sequence for work, _ in steady],
        lengths=[work.length for work, _ in steady],
        asked=[work.num_draft for work, _ in steady],
        drafted=[outcome.num_draft for _, outcome in steady],
        accepted=[outcome.num_accepted for _, outcome in steady],
        draft_passes=[(forward.sequences, forward.tokens) for forward in proposal.forwards],
        draft_seconds=draft_seconds,
        other_seconds=sum(s for name, s in phase_seconds.items() if name != "launch") - draft_seconds,
        chunks=_chunks(plan),
    )


def measure(
    plan: StepPlan, verified: Verified, events: Seq[TokenEvent], phase_seconds: Mapping[str, float],
    draft_failures: int, scheduler: Scheduler, rounds: Seq[RoundResult],
) -> StepStats:  # fmt: skip
    """The step's statistics; `events` are those of `verified.outcomes`, then those of `rounds`."""
    proposal, pool, landed = verified.proposal, scheduler.target_pool, [x for each in rounds for x in each.outcomes]
    works = zip(plan.works, proposal.tokens, strict=True)
    newest = [len(drafts) for work, drafts in works if _feeds_newest_only(work)]
    pairs = zip((*verified.outcomes, *landed), events, strict=True)
    judged = [(outcome.num_draft, sum(event.from_draft)) for outcome, event in pairs if outcome.num_draft]
    return StepStats(
        forwards=(
            *proposal.forwards,
            *_target_forwards(newest, _chunks(plan)),
            *(f for x in rounds for f in x.forwards),
        ),
        phase_seconds=phase_seconds,
        device_seconds=sum(each.feedback.seconds for each in rounds),
        rounds=len(judged),
        drafted=sum(num_draft for num_draft, _ in judged),
        accepted_per_position=_per_position(judged),
        sequences_per_num_draft=_counted([*newest, *(outcome.num_draft for outcome in landed)]),
        generated_tokens=sum(len(event.token_ids) for event in events),
        prompt_tokens=sum(len(range(w.span.start, min(w.span.stop, w.sequence.prompt_len))) for w in plan.works),
        draft_failures=draft_failures,
        threads=threads_in_use(),
        spec_gain=scheduler.gain,
        decode_seconds=scheduler.decode_seconds,
        prompt_token_seconds=scheduler.prefill.times.reading.get(None, 0.0),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_usage=1 - pool.num_free / pool.num_pages,
        **plan.counts,
    )


def _counted(numbers: Iterable[int]) -> tuple[int, ...]:
    """How often each of 0, 1, 2, ... occurs; [2, 0, 2] -> (1, 0, 2)."""
    counts = Counter(numbers)
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def _target_forwards(newest: Seq[int], chunks: Seq[int]) -> Iterator[Forward]:
    """The target's one pass, reported as verification of some sequences' drafts and prefill of chunks of others."""
    if newest:
        yield Forward("verify", len(newest), len(newest) + sum(newest))
    if chunks:
        yield Forward("prefill", len(chunks), sum(chunks))


def _chunks(plan: StepPlan) -> list[int]:
    """The tokens of each sequence that is read, not decoded."""
    return [len(work.span) for work in plan.works if not _feeds_newest_only(work)]


def _feeds_newest_only(work: Work) -> bool:
    return len(work.span) == 1 and work.reaches_end


def _per_position(rounds: Seq[tuple[int, int]]) -> tuple[int, ...]:
    """(K, accepted) of each round -> how many rounds kept draft 0, 1, ...; [(3, 2), (2, 0)] -> (1, 1, 0)."""
    deepest = max((num_draft for num_draft, _ in rounds), default=0)
    return tuple(sum(accepted > position for _, accepted in rounds) for position in range(deepest))
