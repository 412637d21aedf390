"""The distribution of a token that sampling should have, worked out from plain logits, and whether tokens have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from scipy import special  # a third of a second; scipy.stats takes one and a half
from transformers import PreTrainedModel

from pilotfish.engine.params import SamplingParams

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
    """Chi-square over bins of tokens, the rarest together, so that each bin is expected five times or more."""
    counts = Counter(tokens)
    assert counts.keys() <= chances.keys()
    bins: list[list[int]] = []
    for token in sorted(chances, key=chances.__getitem__):
        if bins and counts.total() * sum(chances[each] for each in bins[-1]) < 5:
            bins[-1].append(token)
        else:
            bins.append([token])
    seen, expected = ([sum(law[token] for token in each) for each in bins] for law in (counts, chances))
    assert chi_square(seen, [counts.total() * chance for chance in expected]) > 1e-3


def chi_square(seen: Seq[int], expected: Seq[float]) -> float:
    """The chance of counts as far from the expected ones as these (Pearson's test)."""
    assert abs(sum(seen) - sum(expected)) < 1e-6 * sum(seen)
    distance = sum((count - wanted) ** 2 / wanted for count, wanted in zip(seen, expected, strict=True))
    return float(special.chdtrc(len(seen) - 1, distance))
