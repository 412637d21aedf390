"""The rejection rule keeps the target's law: as an identity, by full enumeration, and through the engine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pilotfish.engine.params import SamplingParams, Verification
from pilotfish.engine.sampling.noise import gumbel
from pilotfish.engine.types import Request
from pilotfish.engine.verify import NO_DRAFT, Draw, coupled, rejection, residual
from tests import fakes
from tests.engine.sampling.test_distribution import definition
from tests.laws import chi_square

GRID = 20  # probabilities are multiples of 1 / GRID, so that midpoints of GRID**2 cells enumerate `accept` exactly


@st.composite
def laws(draw: st.DrawFn, size: int | None = None) -> Tensor:
    """A law over a small vocabulary, often with zeros."""
    size = size or draw(st.integers(2, 12))
    weights = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@given(st.data())
def test_identity(data: st.DataObject) -> None:
    """q * accept + (1 - sum of q * accept) * residual == p."""
    p = data.draw(laws())
    q = data.draw(laws(len(p)))
    accept = torch.where(q > 0, (p / q).clamp(max=1), 0.0)
    left = residual(p, q)
    kept = q * accept
    assert torch.allclose(kept + (1 - kept.sum()) * left / left.sum(), p, atol=1e-12)


def by(noise: Tensor) -> Draw:
    """Draws with Gumbel noise `[B, K + 1, vocab]`."""
    return lambda logits, at: (logits + noise[torch.arange(len(at)), at]).argmax(-1)


def _accept_chance(p: Tensor, q: Tensor, draft: int) -> float:
    """Probability, over all values of `accept`, that `rejection` keeps this draft: counted, not computed."""
    cells = GRID * GRID * 10
    u = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    many = (cells, 1)
    verdict = rejection(
        p.expand(cells, 2, -1),
        q.expand(cells, 1, -1),
        torch.full(many, draft),
        u[:, None],
        by(torch.zeros(cells, 2, 4)),
    )
    return verdict.num_accepted.double().mean().item()


def _next_law(p: Tensor, q: Tensor, draft: int, accepted: bool) -> Tensor:
    """The law of the token after an accepted or a rejected draft: 20,000 independent Gumbel rows through the rule."""
    rows = 20_000
    noise = gumbel(torch.arange(rows), torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long), 4)
    u = torch.full((rows, 1), 1e-12 if accepted else 1 - 1e-12, dtype=torch.float64)
    drafts = torch.full((rows, 1), draft)
    verdict = rejection(p.expand(rows, 2, -1), q.expand(rows, 1, -1), drafts, u, by(noise[:, None].expand(rows, 2, 4)))
    assert verdict.num_accepted.eq(int(accepted)).all()
    return verdict.next_token.bincount(minlength=4).double() / rows


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_enumeration_over_four_tokens(data: st.DataObject) -> None:
    """Sum over every draft, acceptance and resample, each through the rule itself: the next token's law is p."""
    p, q = _on_grid(data.draw(laws(4))), _on_grid(data.draw(laws(4)))
    law = torch.zeros(4, dtype=torch.float64)
    for draft in range(4):
        if q[draft] > 0:
            chance = _accept_chance(p, q, draft)
            assert chance == pytest.approx(min(1.0, (p[draft] / q[draft]).item()), abs=1e-3)
            law[draft] += q[draft] * chance
            if chance < 1:
                law += q[draft] * (1 - chance) * _next_law(p, q, draft, accepted=False)
            if chance > 0:
                assert torch.allclose(_next_law(p, q, draft, accepted=True), p, atol=0.02), "the bonus token's law is p"
    assert torch.allclose(law, p, atol=0.02)


def _exact_chance(p: Tensor, q: Tensor, draft: int) -> float:
    """min(1, p / q), after seeing the rule itself change its mind just there."""
    chance = min(1.0, (p[draft] / q[draft]).item())
    for u, kept in ((chance - 1e-9, True), (chance + 1e-9, False)):
        if 0 < u < 1:
            one = torch.tensor([[u]], dtype=torch.float64)
            drafts, noise = torch.tensor([[draft]]), torch.zeros(1, 2, 4, dtype=torch.float64)
            assert bool(rejection(p.expand(1, 2, -1), q.expand(1, 1, -1), drafts, one, by(noise)).num_accepted) is kept
    return chance


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_two_drafts_enumerated_exactly(data: st.DataObject) -> None:
    """Every pair of drafts and every outcome over four tokens: the joint law of two tokens is the target's, to 1e-12.

    That the next token follows the normalised residual is the Gumbel-max theorem, tested above by drawing.
    """
    first_p, first_q = data.draw(laws(4)), data.draw(laws(4))
    second_p, second_q = ([data.draw(laws(4)) for _ in range(4)] for _ in "pq")
    joint = torch.zeros(4, 4, dtype=torch.float64)
    for a in first_q.nonzero().flatten().tolist():
        chance = _exact_chance(first_p, first_q, a)
        left = residual(first_p, first_q) / residual(first_p, first_q).sum()
        # Rejected: the first token is drawn anew, and the second by the target alone in the next round.
        joint += first_q[a] * (1 - chance) * left[:, None] * torch.stack(second_p)
        for b in second_q[a].nonzero().flatten().tolist():
            kept = first_q[a] * chance * second_q[a][b]
            again = _exact_chance(second_p[a], second_q[a], b)
            rest = residual(second_p[a], second_q[a])
            joint[a, b] += kept * again
            joint[a] += kept * (1 - again) * rest / rest.sum()
    assert torch.allclose(joint, first_p[:, None] * torch.stack(second_p), atol=1e-12)


def _on_grid(law: Tensor) -> Tensor:
    """Round to multiples of 1 / GRID that still sum to 1."""
    counts = (law * GRID).floor()
    counts[law.argmax()] += GRID - counts.sum()
    return counts / GRID


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ragged_rows_do_not_see_their_padding(data: st.DataObject) -> None:
    """A sequence with fewer drafts gets what it gets alone."""
    size, width = 5, 3
    p = torch.stack([data.draw(laws(size)) for _ in range(width + 1)])
    q = torch.stack([data.draw(laws(size)) for _ in range(width)])
    k = data.draw(st.integers(0, width))
    drafts = torch.tensor(
        [data.draw(st.sampled_from(q[i].nonzero().flatten().tolist())) for i in range(k)], dtype=torch.long
    )
    u = torch.tensor(data.draw(st.lists(st.floats(0.01, 0.99), min_size=width, max_size=width)), dtype=torch.float64)
    noise = torch.randn(width + 1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    by_itself = rejection(p[None, : k + 1], q[None, :k], drafts[None], u[None, :k], by(noise[None, : k + 1]))
    q_padded = q.clone()
    q_padded[k:] = 0
    padding = torch.full((width - k,), NO_DRAFT)
    in_company = rejection(p[None], q_padded[None], torch.cat([drafts, padding])[None], u[None], by(noise[None]))
    assert in_company.num_accepted.tolist() == by_itself.num_accepted.tolist()
    assert in_company.next_token.tolist() == by_itself.next_token.tolist()


def test_coupled_keeps_the_leading_run() -> None:
    for drafts, num_accepted in (((5, 6), 2), ((5, 9), 1), ((9, 6), 0), ((5,), 1), ((), 0)):
        assert coupled([5, 6, 7][: len(drafts) + 1], drafts) == num_accepted


TABLE = torch.tensor(
    [[0.50, 0.30, 0.15, 0.05], [0.10, 0.20, 0.30, 0.40], [0.25, 0.25, 0.25, 0.25], [0.70, 0.10, 0.10, 0.10]],
    dtype=torch.float64,
)
DRAFT_TABLE = torch.tensor(
    [[0.25, 0.25, 0.25, 0.25], [0.40, 0.30, 0.20, 0.10], [0.60, 0.20, 0.10, 0.10], [0.05, 0.05, 0.45, 0.45]],
    dtype=torch.float64,
)


PLAIN = SamplingParams(temperature=1.0)
TRUNCATED = SamplingParams(temperature=0.7, top_k=3, top_p=0.9)


@pytest.mark.parametrize(
    ("cut", "rule", "num_draft"),
    [
        pytest.param(False, Verification.REJECTION, 2, id="False-rejection-2"),
        pytest.param(True, Verification.REJECTION, 2, marks=pytest.mark.slow),
        pytest.param(True, Verification.COUPLED, 2, marks=pytest.mark.slow),
    ],
)
def test_chi_square_through_the_engine(cut: bool, rule: Verification, num_draft: int) -> None:
    """6,000 requests, three tokens each, against the 64 exact probabilities of the Markov chain.

    Calibrated: for a right law the p-value is uniform, so a bound of 1e-3 fails one seed in a thousand; a law
    off by 3 % in total variation would fail it nearly always at this size.
    """
    law = TRUNCATED if cut else PLAIN
    engine = fakes.fake_engine(
        fakes.markov_law(TABLE),
        vocab_size=4,
        draft_law=fakes.markov_law(DRAFT_TABLE),
        proposer="model",
        num_draft_tokens=num_draft,
        verification=rule,
        num_pages=256,
        max_batch_size=256,
        max_batch_tokens=2048,
    )
    requests = [
        Request(request_id=str(i), token_ids=(0,), sampling=replace(law, seed=i, max_tokens=3)) for i in range(6000)
    ]
    outputs = [fakes.run(engine, requests[i : i + 500]) for i in range(0, 6000, 500)]
    counts = dict.fromkeys(itertools.product(range(4), repeat=3), 0)
    for tokens in (tokens for output in outputs for tokens in output.tokens.values()):
        counts[tuple(tokens)] += 1
    table = torch.tensor([definition(row.log().tolist(), law) for row in TABLE])
    chance = {(a, b, c): (table[0, a] * table[a, b] * table[b, c]).item() for a, b, c in counts}
    possible = [key for key in counts if chance[key] > 0]
    assert sum(counts[key] for key in possible) == 6000, "a token that the law forbids"
    total = sum(chance.values())
    seen, expected = [counts[key] for key in possible], [6000 * chance[key] / total for key in possible]
    assert chi_square(seen, expected) > 1e-3
    stats = [ended.stats for output in outputs for ended in output.finished.values()]
    assert 0.2 < sum(s.accepted for s in stats) / sum(s.drafted for s in stats) < 0.95
