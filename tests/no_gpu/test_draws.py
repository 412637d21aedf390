"""What a plain step's draw costs on a card: launches, and what the host waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.params import SamplingParams, Verification
from engine.sampling.verification import VerifyInput, verify_rows
from tests.card import here
from tests.engine.sampling.test_distribution import row

VOCAB, K = 500, 4
WHOLE = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.8, top_p=0.9)
MOST = {Verification.COUPLED: 45, Verification.REJECTION: 110}  # torch's noise alone takes 130


def cost_of(law: SamplingParams, rule: Verification, size: int) -> tuple[Counter[str], Counter[str]]:
    """Launches by name, and waits, of one step of `size` sequences with `K` drafts each."""
    fed = []
    for seed in range(size):
        sequence = row(law, 5, seed).sequence
        sequence.speculation = replace(sequence.speculation, verification=rule)
        fed.append(VerifyInput(sequence, tuple(range(K))))
    logits = torch.randn(size * (K + 1), VOCAB)
    with here() as card:
        there = logits.cuda()
        card.launched.clear()
        card.waits.clear()
        verify_rows(fed, there)
        return Counter(card.launched), Counter(card.waits)


@pytest.mark.parametrize("rule", list(Verification))
@pytest.mark.parametrize("law", [WHOLE, CUT])
def test_a_draw_is_a_handful_of_launches_for_any_batch(law, rule):
    """Nothing of it is waited for but its answer, and what a cut of the rejection rule keeps."""
    (small, _), (large, waits) = (cost_of(law, rule, size) for size in (1, 16))
    assert small["choose_unread"] == large["choose_unread"] == 1
    assert small.total() <= large.total() <= MOST[rule]
    assert waits.keys() <= {"verification.py:_decide", "distribution.py:_support"}
