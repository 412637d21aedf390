"""The law of a row against a slow reading of its definition, and draws against the law."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.params import SamplingParams
from pilotfish.engine.sampling import distribution, noise
from pilotfish.engine.sampling.distribution import samplers_of
from pilotfish.engine.sampling.noise import LogitsRow, Stream
from tests import fakes


def row(params: SamplingParams, position: int = 0, seed: int = 0) -> LogitsRow:
    return LogitsRow(fakes.sequence([1] * (position + 1), sampling=params, seed=seed), (), Stream.COUPLED)


def definition(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, one token at a time."""
    if params.temperature == 0:
        best = logits.index(max(logits))
        return [float(i == best) for i in range(len(logits))]
    top = max(logits)
    weight = [math.exp((x - top) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: params.top_k or len(order)]
    total, running, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if kept and running >= params.top_p * total and params.top_p < 1:
            break
        kept.append(i)
        running += weight[i]
    kept = [i for i in kept if weight[i] >= params.min_p * weight[order[0]]]
    mass = sum(weight[i] for i in kept)
    return [weight[i] / mass if i in kept else 0.0 for i in range(len(logits))]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.93, 0.61, 0.2, 0.01, 0.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.31, 1.0]),
)
LOGITS = st.lists(st.sampled_from([-3.0, -1.5, -0.4, 0.0, 0.7, 1.1, 2.9]), min_size=12, max_size=12)


@settings(max_examples=50)
@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=6))
def test_law_is_the_definition(rows: list[tuple[list[float], SamplingParams]]) -> None:
    """Rows of different parameters in one batch; ties are everywhere in these logits."""
    logits = torch.tensor([values for values, _ in rows])
    params = samplers_of([row(p) for _, p in rows], 12)
    want = torch.tensor([definition(values, p) for values, p in rows], dtype=torch.float64)
    assert torch.allclose(distribution.probabilities(logits, params), want, atol=1e-6)
    drawn = distribution.choose(logits, params).token
    assert (want.gather(1, drawn[:, None]) > 0).all(), "a token outside the law was drawn"


def test_draws_follow_the_law() -> None:
    logits = torch.tensor([0.3, 1.2, -0.5, 0.9, 2.0]).expand(5_000, -1)
    wanted = SamplingParams(temperature=0.9, top_p=0.95)
    params = samplers_of([row(wanted, seed=i) for i in range(5_000)], 5)
    counts = distribution.choose(logits, params).token.bincount(minlength=5)
    law = distribution.probabilities(logits[:1], samplers_of([row(wanted)], 5))[0]
    kept = law > 0
    assert counts[~kept].sum() == 0
    from tests.laws import (
        chi_square,
    )  # needs scipy, which the machine of a card may lack: tests/kernels take `row` from here

    assert chi_square(counts[kept].tolist(), (law[kept] * 5_000).tolist()) > 1e-3


@settings(max_examples=40)
@given(LOGITS, PARAMS, PARAMS, st.integers(0, 2**63))
def test_a_draw_does_not_see_its_batch_mates(
    values: list[float], mine: SamplingParams, other: SamplingParams, seed: int
) -> None:
    logits = torch.tensor([values, values[::-1]])
    alone = distribution.choose(logits[:1], samplers_of([row(mine, 5, seed)], 12))
    both = distribution.choose(logits, samplers_of([row(mine, 5, seed), row(other, 6, 1)], 12))
    assert both.token[0] == alone.token[0]


@settings(max_examples=30)
@given(st.sampled_from([-math.inf, math.nan, math.inf]), st.lists(PARAMS, min_size=1, max_size=4))
def test_a_row_without_a_law_is_no_ones_fault(value: float, mixed: list[SamplingParams]) -> None:
    """`verify_rows` ends its request; until then it must neither raise nor change what the row beside it gives."""
    healthy, sick = [float(i % 5) for i in range(12)], [value] * 12
    rows = [row(SamplingParams(temperature=1.0, top_k=3)), *map(row, mixed)]
    logits = torch.tensor([healthy, *[sick] * len(mixed)])
    params = samplers_of(rows, 12)
    alone = samplers_of(rows[:1], 12)
    among_sick = samplers_of(rows[1:], 12)
    assert distribution.choose(logits[1:], among_sick).token.shape == (len(mixed),)
    assert distribution.choose(logits, params).token[0] == distribution.choose(logits[:1], alone).token[0]
    assert distribution.probabilities(logits, params)[0].equal(distribution.probabilities(logits[:1], alone)[0])


@settings(max_examples=50)
@given(st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1)), min_size=1, max_size=8), st.integers(0, 99))
def test_a_draw_is_the_likeliest_token_under_noise(wanted: list[tuple[SamplingParams, int]], seed: int) -> None:
    """Over the whole vocabulary, whatever is left out of the computation; greedy rows draw without noise."""
    logits = torch.randn(len(wanted), 50, generator=torch.Generator().manual_seed(seed)).mul(3)
    params = samplers_of([row(p, i, s) for i, (p, s) in enumerate(wanted)], 50)
    noisy = noise.gumbel(params.seed, params.position, params.stream, 50)
    scores = distribution.probabilities(logits, params).log() + noisy
    drawn = distribution.choose(logits, params)
    assert drawn.token.tolist() == scores.argmax(-1).tolist()
    assert drawn.sound.all()
    free = [not (p.top_k or p.top_p < 1 or p.min_p) for p, _ in wanted]
    assert not all(free) or torch.equal(distribution.choose(logits, params, truncated=False).token, drawn.token)


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [0, *(1 << bit for bit in range(64))]
    params = samplers_of([row(SamplingParams(), seed=seed) for seed in seeds], 12)
    assert len(set(noise.uniform(params.seed, params.position, Stream.ACCEPT).tolist())) == len(seeds)


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3]])
    for temperature in (5e-324, 1e-40, 1e-3, 100.0):
        params = samplers_of([row(SamplingParams(temperature=temperature))], 3)
        law = distribution.probabilities(logits, params)
        assert law.isfinite().all()
        assert law.sum().item() == 1.0
        if temperature < 1:
            assert distribution.choose(logits, params).token.tolist() == [0]
