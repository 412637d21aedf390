"""The statistics of a step, for operators, and the feedback for control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.device_loop.results import RoundResult
from pilotfish.engine.native import threads_in_use
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.stats import Forward, StepStats
from pilotfish.engine.step import Step
from pilotfish.engine.types import TokenEvent


def feedback_of(step: Step, phase_seconds: Mapping[str, float]) -> StepFeedback:
    """Feedback for control: the part of a step with newest tokens and drafts."""
    steady = [work for work in step.works if work.decodes]
    draft_seconds = phase_seconds["propose"]
    return StepFeedback(
        sequences=[work.sequence for work in steady],
        lengths=[work.length for work in steady],
        asked=[work.num_draft for work in steady],
        drafted=[work.num_verified for work in steady],
        accepted=[work.num_accepted for work in steady],
        draft_passes=[(forward.sequences, forward.tokens) for forward in step.draft_forwards],
        draft_seconds=draft_seconds,
        other_seconds=sum(s for name, s in phase_seconds.items() if name != "launch") - draft_seconds,
        chunks=_chunks(step),
    )


def measure(
    step: Step, events: Seq[TokenEvent], phase_seconds: Mapping[str, float], draft_failures: int, scheduler: Scheduler,
    rounds: Seq[RoundResult],
) -> StepStats:  # fmt: skip
    """The step's statistics; `events` are those of what was decided in it, then those of `rounds`."""
    pool, landed = scheduler.target_pool, [work for each in rounds for work in each.works]
    newest = [work.num_verified for work in step.works if work.decodes]
    pairs = zip((*step.decided, *landed), events, strict=True)
    judged = [(work.num_verified, sum(event.from_draft)) for work, event in pairs if work.num_verified]
    return StepStats(
        forwards=(
            *step.draft_forwards,
            *_target_forwards(newest, _chunks(step)),
            *(f for x in rounds for f in x.forwards),
        ),
        phase_seconds=phase_seconds,
        device_seconds=sum(each.feedback.seconds for each in rounds),
        rounds=len(judged),
        drafted=sum(num_draft for num_draft, _ in judged),
        accepted_per_position=_per_position(judged),
        sequences_per_num_draft=_counted([*newest, *(work.num_verified for work in landed)]),
        generated_tokens=sum(len(event.token_ids) for event in events),
        prompt_tokens=sum(len(range(w.span.start, min(w.span.stop, w.sequence.prompt_len))) for w in step.works),
        draft_failures=draft_failures,
        threads=threads_in_use(),
        spec_gain=scheduler.gain,
        decode_seconds=scheduler.decode_seconds,
        prompt_token_seconds=scheduler.prefill.times.reading.get(None, 0.0),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_usage=1 - pool.num_free / pool.num_pages,
        **step.counts,
    )


def _counted(numbers: Iterable[int]) -> tuple[int, ...]:
    """Occurrences of 0, 1, 2, ...; [2, 0, 2] -> (1, 0, 2)."""
    counts = Counter(numbers)
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def _target_forwards(newest: Seq[int], chunks: Seq[int]) -> Iterator[Forward]:
    """The target's pass, reported as verification of drafts and as prefill of chunks."""
    if newest:
        yield Forward("verify", len(newest), len(newest) + sum(newest))
    if chunks:
        yield Forward("prefill", len(chunks), sum(chunks))


def _chunks(step: Step) -> list[int]:
    """The tokens of each sequence in prefill."""
    return [len(work.span) for work in step.works if not work.decodes]


def _per_position(rounds: Seq[tuple[int, int]]) -> tuple[int, ...]:
    """(K, accepted) of each round -> number of rounds that accepted draft 0, 1, ...; [(3, 2), (2, 0)] -> (1, 1, 0)."""
    deepest = max((num_draft for num_draft, _ in rounds), default=0)
    return tuple(sum(accepted > position for _, accepted in rounds) for position in range(deepest))
