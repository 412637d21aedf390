"""What a plain step's draw costs on a card: launches, and what the host waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.params import SamplingParams, Verification
from pilotfish.engine.sampling.verification import verify_rows
from pilotfish.engine.step import Work
from tests.card import here
from tests.engine.sampling.test_distribution import row

VOCAB, K = 500, 4
WHOLE = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.8, top_p=0.9)
MOST = {Verification.COUPLED: 10, Verification.REJECTION: 80}  # torch's noise alone takes 130


def cost_of(law: SamplingParams, rule: Verification, size: int) -> tuple[Counter[str], Counter[str], int]:
    """Launches by name, waits and uploads of one step of `size` sequences with `K` drafts each."""
    fed = []
    for seed in range(size):
        sequence = row(law, 5, seed).sequence
        sequence.speculation = replace(sequence.speculation, verification=rule)
        length = len(sequence.tokens)
        fed.append(Work(sequence, range(length - 1, length), length, K, tuple(range(K))))
    logits = torch.randn(size * (K + 1), VOCAB)
    with here() as card:
        there = logits.cuda()
        card.launched.clear()
        card.waits.clear()
        before = card.uploads
        verify_rows(fed, there)
        return Counter(card.launched), Counter(card.waits), card.uploads - before


@pytest.mark.parametrize("rule", list(Verification))
@pytest.mark.parametrize("law", [WHOLE, CUT])
def test_a_draw_is_a_handful_of_launches_for_any_batch(law, rule):
    """Nothing of it is waited for but its answer."""
    (small, *_), (large, waits, uploads) = (cost_of(law, rule, size) for size in (1, 16))
    assert small["choose"] == large["choose"] == 1
    assert small.total() <= large.total() <= MOST[rule]
    assert waits.keys() == {"verification.py:_read"}
    assert uploads == 1, "parameters, and under the rejection rule the drafts, in one copy"


def test_a_greedy_draw_uploads_nothing():
    assert cost_of(SamplingParams(), Verification.COUPLED, 16)[2] == 0
