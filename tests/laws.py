"""The distribution of a token that sampling should have, worked out from plain logits, and whether tokens have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from scipy import stats
from transformers import PreTrainedModel

from engine.params import SamplingParams

Chances = dict[int, float]  # by token


@torch.no_grad()
def of_next(model: PreTrainedModel, context: tuple[int, ...], sampling: SamplingParams) -> Chances:
    """Of the token after `context`, under a temperature and a `top_k`."""
    scores, tokens = model(torch.tensor([context])).logits[0, -1].double().topk(sampling.top_k)
    return dict(zip(tokens.tolist(), (scores / sampling.temperature).softmax(0).tolist(), strict=True))


def of_later(model: PreTrainedModel, context: tuple[int, ...], sampling: SamplingParams, places: int) -> Chances:
    """Of the token `places` places after the next one, over all that may come between."""
    found = of_next(model, context, sampling)
    if not places:
        return found
    total: Chances = {}
    for token, chance in found.items():
        for later, then in of_later(model, (*context, token), sampling, places - 1).items():
            total[later] = total.get(later, 0.0) + chance * then
    return total


def assert_drawn(tokens: Iterable[int], chances: Chances) -> None:
    """Chi-square over the tokens that are expected five times or more, and all others together."""
    counts = Counter(tokens)
    assert counts.keys() <= chances.keys()
    number = counts.total()
    often = [token for token, chance in chances.items() if chance * number >= 5]
    seen = [counts[token] for token in often] + [sum(counts[token] for token in chances if token not in often)]
    expected = [number * chances[token] for token in often]
    assert stats.chisquare(seen, [*expected, number - sum(expected)]).pvalue > 1e-3
