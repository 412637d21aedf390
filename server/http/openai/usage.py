"""Tokens counted and what drafting achieved, as answers tell it. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pilotfish.v1 import generation_pb2 as pb

Json = dict[str, Any]


def usage_of(prompts: Iterable[Sequence[pb.Finished]], reasoning_tokens: int) -> Json:
    """Return the usage of all outputs, given the ends of the outputs of each prompt. A prompt counts once.

    Its cached tokens are the minimum over its outputs, because later outputs may find the prompt cached by the first.
    """
    by_prompt = [[end.usage for end in ends] for ends in prompts]
    every = [usage for usages in by_prompt for usage in usages]
    details = {
        "reasoning_tokens": reasoning_tokens,
        "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in every),
        "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in every),
    }
    cached = sum(min(usage.cached_prompt_tokens for usage in usages) for usages in by_prompt)
    counted = usage_so_far(
        sum(usages[0].prompt_tokens for usages in by_prompt), sum(usage.completion_tokens for usage in every)
    )
    return counted | {"prompt_tokens_details": {"cached_tokens": cached}, "completion_tokens_details": details}


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the usage as far as it is known before the end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculation_of(finished: pb.Finished) -> Json:
    """Return what drafting did for one output, named as in the protocol."""
    stats = finished.speculation_stats
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length,
        "gain_ratio": stats.gain_ratio,
    }


def metrics_of(finished: pb.Finished) -> Json:
    """Return the same for the only output of an answer, in the form that vLLM sends and that AIPerf reads.

    Entry j of the histogram counts the rounds that kept exactly j drafts. Without a round there is nothing to tell.
    """
    stats = finished.speculation_stats
    if not stats.rounds:
        return {}
    kept = [stats.rounds, *stats.accepted_per_position]  # entry j counts the rounds that kept at least j drafts
    found = {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": [*(least - more for least, more in pairwise(kept)), kept[-1]],
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(kept) - 1,
    }
    return {"metrics": {"speculative_decoding": found}}
