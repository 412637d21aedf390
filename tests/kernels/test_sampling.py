"""Tokens drawn by the kernels are the tokens drawn on the CPU: same noise, same law, nothing sorted."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.kernels import sampling as kernels
from pilotfish.engine.kernels import truncation
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.sampling import distribution
from pilotfish.engine.sampling.distribution import TINY, samplers_of
from pilotfish.engine.sampling.noise import Stream
from tests.engine.sampling.test_distribution import row
from tests.interpreting import DEVICE
from tests.kernels.test_attention import LOOKING

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 0.93, 0.5, 0.2, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.31, 1.0]),
)
TRUNCATED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 64, 200, 300, 301, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.2, 1e-12]),
)
KINDS = ["ties", "free", "masked", "equal", "one left", "spread"]


def logits_of(kind, rows, vocab, seed):
    """Normal ones: rounded, free, partly masked; all the same, all masked but the last; scores of all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        return logits.round()
    if kind == "masked":
        logits[:, 1:][torch.rand(rows, vocab - 1, generator=generator) < 0.6] = -math.inf
    if kind == "equal":
        logits[:] = 0.7
    if kind == "one left":
        logits[:, :-1] = -math.inf
    if kind == "spread":
        # None so near 0 that whether exp(score) is 1 hangs on how a library rounds.
        return -torch.exp2(46 * torch.rand(rows, vocab, generator=generator) - 40)
    return logits


def both(rows, vocab):
    return samplers_of(rows, vocab), samplers_of(rows, vocab, torch.device(DEVICE))


def choose(logits, samplers, **options):
    return kernels.choose(logits.to(DEVICE), samplers, **options).token.cpu()


@settings(max_examples=2, phases=LOOKING)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=1, max_size=3),
    st.sampled_from([3, 64, 301]),
    st.sampled_from(KINDS),
)
@example(3, [(SamplingParams(temperature=1.0, top_k=200), s, 5) for s in range(4)], 301, "equal")  # a tie over blocks
def test_the_same_tokens_as_on_the_cpu(seed, wanted, vocab, kind):
    logits = logits_of(kind, len(wanted), vocab, seed)
    params, samplers = both([row(p, position, s) for p, s, position in wanted], vocab)
    with mock.patch.object(kernels, "_BLOCK", 128), mock.patch.object(truncation, "BLOCK", 256):
        got = choose(logits, samplers)
    assert torch.equal(got, distribution.choose(logits, params).token)
    if not any(p.top_k or p.top_p < 1 or p.min_p for p, _, _ in wanted):
        assert torch.equal(choose(logits, samplers, truncated=False), got)


def kept_by_the_kernels(logits, samplers, block):
    """Which tokens the ends that the kernels find leave in: bool `[R, vocab]`."""
    num_rows, vocab = logits.shape
    blocks = -(-vocab // block)
    padded = torch.full((num_rows, blocks * block), -math.inf)
    padded[:, :vocab] = logits
    peaks = padded.view(num_rows, blocks, block).amax(-1)
    search = truncation.Search.empty(num_rows, blocks, DEVICE)
    search.bins.zero_()
    truncation.find_ends(logits.to(DEVICE), samplers.dense(), peaks.to(DEVICE), search, block)
    scores = (logits - logits.amax(-1, keepdim=True)) / samplers.temperature.cpu().clamp(min=TINY)[:, None]
    rank = scores.view(torch.int32) & 0x7FFFFFFF
    last, allowed = search.last.cpu()[:, None], search.allowed.cpu()[:, None]
    ties = rank == last
    is_split = allowed[:, 0] < truncation.NEVER.value
    padded = torch.zeros(num_rows, blocks * block, dtype=torch.int32)
    padded[:, :vocab] = ties
    counted = padded.view(num_rows, blocks, block).sum(-1)
    assert torch.equal(search.ties.cpu()[is_split].long(), counted[is_split])  # each block's part of the split rank
    return (rank < last) | (ties & (ties.int().cumsum(1) <= allowed))


@pytest.mark.slow
@settings(max_examples=2, phases=LOOKING)
@given(
    st.integers(0, 1000),
    st.lists(TRUNCATED, min_size=1, max_size=4),
    st.sampled_from([64, 301]),
    st.sampled_from(KINDS),
)
@example(3, [SamplingParams(temperature=1.0, top_k=200, top_p=0.5)] * 2, 301, "equal")  # splits a tie over all blocks
@example(3, [SamplingParams(temperature=1.0, top_k=300, top_p=0.5)] * 2, 301, "spread")  # tokens added one by one
def test_laws_end_where_they_end_on_the_cpu(seed, wanted, vocab, kind):
    """Token for token, so that also what is hardly ever drawn is right."""
    logits = logits_of(kind, len(wanted), vocab, seed)
    params, samplers = both([row(p, 5, 1) for p in wanted], vocab)
    with mock.patch.object(truncation, "BLOCK", 256):
        got = kept_by_the_kernels(logits, samplers, 128)
    scores = (logits - logits.amax(-1, keepdim=True)) / params.temperature[:, None]
    ranked, tokens = scores.sort(dim=-1, descending=True, stable=True)
    want = torch.zeros_like(got).scatter_(1, tokens, distribution.kept(ranked, params))
    assert torch.equal(got, want)


def test_streams():
    wanted = SamplingParams(temperature=1.0)
    rows = [row(wanted, 5, seed)._replace(stream=stream) for stream in Stream for seed in range(2)]
    params, samplers = both(rows, 90)
    logits = torch.zeros(len(rows), 90)
    assert torch.equal(choose(logits, samplers, truncated=False), distribution.choose(logits, params).token)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_law_is_no_ones_fault():
    """Its token is a token, and the row beside it does not notice."""
    greedy, free = SamplingParams(), SamplingParams(temperature=1.0)
    cut = SamplingParams(temperature=1.0, top_k=3, top_p=0.9)
    infinite = (-math.inf, math.nan, math.inf)
    sick = [(greedy, math.nan), (free, -math.inf), (free, math.inf), *((cut, x) for x in infinite)]
    healthy = torch.randn(1, 70, generator=torch.Generator().manual_seed(0))
    rows = [row(p, 5, 1) for p in (*(p for p, _ in sick), cut)]
    _, samplers = both(rows, 70)
    _, alone = both(rows[-1:], 70)
    got = choose(torch.cat([*(torch.full((1, 70), value) for _, value in sick), healthy]), samplers)
    assert ((got >= 0) & (got < 70)).all()
    assert got[-1] == choose(healthy, alone)[0]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_whether_rows_are_sound():
    """One number that is none is enough; the kernels and plain torch agree."""
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(0))
    logits[0, 300], logits[1, 7], logits[2], logits[3, :300] = math.nan, math.inf, -math.inf, -math.inf
    wanted = SamplingParams(temperature=1.0, top_p=0.9)
    _, samplers = both([row(wanted, 5, 1)] * 5, 301)
    for cut in (True, False):
        for draw in (kernels.choose, distribution.choose):
            sound = draw(logits.to(DEVICE), samplers, truncated=cut).sound.tolist()
            assert sound == [False] * 3 + [True] * 2
