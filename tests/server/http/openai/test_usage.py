"""Tokens counted over prompts and outputs, and the figures of drafting in the form that AIPerf reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engine.types import DraftStats
from pilotfish.server.http.openai.answers import metrics_of, usage_of
from tests.server.http.interfaces import ended


def end(prompt, completion, cached=0, accepted=0):
    return ended(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_prompt_tokens=cached,
        accepted_prediction_tokens=accepted,
    )


def test_a_prompt_counts_once_and_outputs_count_each():
    ends = [
        [end(5, 1, cached=4, accepted=1), end(5, 2, cached=0)],
        [end(7, 4, cached=6), end(7, 8, cached=7)],
    ]
    assert usage_of(ends, 2, 9) == {
        "prompt_tokens": 12,
        "completion_tokens": 15,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {
            "reasoning_tokens": 9,
            "accepted_prediction_tokens": 1,
            "rejected_prediction_tokens": 7,
        },
    }


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_the_histogram_fits_the_totals(kept):
    """`kept`: drafts that each round kept, of 6."""
    per_position = [sum(k > i for k in kept) for i in range(6)]
    stats = DraftStats(len(kept), 6 * len(kept), sum(kept), tuple(per_position))
    found = metrics_of(ended(stats=stats))["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert histogram == [kept.count(j) for j in range(7)]
    assert sum(histogram) == found["num_spec_steps"]
    assert sum(j * rounds for j, rounds in enumerate(histogram)) == found["num_accepted_draft_tokens"] == sum(kept)
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert found["mean_acceptance_length"] == pytest.approx(1 + sum(kept) / len(kept))
    assert found["draft_acceptance_rate"] == pytest.approx(sum(kept) / (6 * len(kept)))


def test_without_a_round_there_is_nothing_to_tell():
    assert metrics_of(ended()) == {}
