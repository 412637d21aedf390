"""Tokens drawn by the kernels are the tokens drawn on the CPU: same noise, same law, nothing sorted."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from engine import sampling
from engine.kernels import cuts
from engine.kernels import sampling as kernels
from engine.kernels.args import Laws
from engine.noise import Stream
from engine.sampling import RowParams
from engine.types import SamplingParams
from tests.engine.test_sampling import row
from tests.interpreting import DEVICE
from tests.kernels.test_attention import LOOKING

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 0.93, 0.5, 0.2, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.31, 1.0]),
)


def laws_of(rows, vocab):
    params = RowParams.of(rows, vocab, torch.device("cpu"))
    greedy = torch.tensor([r.sequence.request.sampling.temperature == 0 for r in rows])
    temperature = params.temperature.masked_fill(greedy, 0)
    numbers = (params.top_k, params.top_p, params.min_p, params.seed, params.position, params.stream)
    return params, Laws(*(x.to(DEVICE) for x in (temperature, *numbers)))


def choose(logits, laws, **options):
    return kernels.choose(logits.to(DEVICE), laws, **options).cpu()


@settings(max_examples=25, phases=LOOKING)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=1, max_size=4),
    st.sampled_from([3, 64, 301]),
    st.sampled_from(["ties", "free", "masked"]),
)
def test_the_same_tokens_as_on_the_cpu(seed, wanted, vocab, kind):
    """Several blocks per row, so that what is drawn does not hang on where a token lies."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(wanted), vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, 1:][torch.rand(len(wanted), vocab - 1, generator=generator) < 0.6] = -math.inf
    params, laws = laws_of([row(p, position, s) for p, s, position in wanted], vocab)
    with mock.patch.object(kernels, "_BLOCK", 64), mock.patch.object(cuts, "BLOCK", 128):
        got = choose(logits, laws)
    assert torch.equal(got, sampling.choose(logits, params))
    if not any(p.top_k or p.top_p < 1 or p.min_p for p, _, _ in wanted):
        assert torch.equal(choose(logits, laws, cuts=False), got)


@pytest.mark.parametrize("stream", list(Stream))
def test_streams(stream):
    wanted = SamplingParams(temperature=1.0)
    rows = [row(wanted, 5, seed)._replace(stream=stream) for seed in range(20)]
    params, laws = laws_of(rows, 90)
    logits = torch.zeros(20, 90)
    assert torch.equal(choose(logits, laws, cuts=False), sampling.choose(logits, params))


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_law_is_no_ones_fault(value):
    """Its token is a token, and the row beside it does not notice."""
    wanted = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3, top_p=0.9)]
    rows = [row(p, 5, 1) for p in wanted]
    healthy = torch.randn(1, 70, generator=torch.Generator().manual_seed(0))
    _, laws = laws_of([*rows, rows[2]], 70)
    _, alone = laws_of(rows[2:], 70)
    got = choose(torch.cat([torch.full((3, 70), value), healthy]), laws)
    assert ((got >= 0) & (got < 70)).all()
    assert got[3] == choose(healthy, alone)[0]
