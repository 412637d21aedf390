"""The rules one token after another are what transformers computes in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.recurrent import rules
from pilotfish.engine.recurrent.arena import PartSlots, ScanPlan, StatePart
from pilotfish.engine.recurrent.rules import silu, softplus
from pilotfish.engine.types import EMPTY_STATE, StateSpan

ROWS, HEADS, GROUPS, KEYS, VALUES = 21, 4, 2, 6, 5


def slots(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> PartSlots:
    """Two slots: the empty one and the one that a pass over one sequence writes. Nothing is logged."""
    feed = Feed([0] * ROWS, 0, [0], state=StateSpan(EMPTY_STATE, 0, 1, ROWS))
    plan = ScanPlan.of(RaggedBatch.of([feed], ROWS, torch.device("cpu")), 0)
    return PartSlots(*StatePart(shape, VALUES, dtype).tensors(2, 0, torch.device("cpu")), plan)


def drawn(*shape: int) -> Tensor:
    return torch.randn(1, *shape)


def in_chunks(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The library's gated delta rule; older versions want as many heads of q and k as of v."""
    q, k = (rows.repeat_interleave(v.shape[2] // rows.shape[2], 2) for rows in (q, k))
    out, state = modeling_qwen3_next.torch_chunk_gated_delta_rule(q, k, v, chunk_size=8, **given)
    return out, state


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [GROUPS, HEADS])
def test_gated_delta(heads: int) -> None:
    q, k, v = drawn(ROWS, GROUPS, KEYS), drawn(ROWS, GROUPS, KEYS) / KEYS, drawn(ROWS, heads, VALUES)
    given = {"g": -drawn(ROWS, heads).abs(), "beta": drawn(ROWS, heads).sigmoid()}
    own = slots((heads, KEYS, VALUES))
    got = rules.delta(own, q[0] * KEYS**-0.5, k[0], v[0], *(rows[0] for rows in given.values()))
    want, state = in_chunks(q, k, v, output_final_state=True, **given)
    close(got, want[0])
    close(own.states[1], state[0])
    assert not own.states[EMPTY_STATE].any()


def test_kimi_delta() -> None:
    q, k, v = drawn(ROWS, HEADS, KEYS), drawn(ROWS, HEADS, KEYS) / KEYS, drawn(ROWS, HEADS, VALUES)
    given = {"g": -drawn(ROWS, HEADS, KEYS).abs(), "beta": drawn(ROWS, HEADS).sigmoid()}
    own = slots((HEADS, KEYS, VALUES))
    got = rules.delta(own, q[0] * KEYS**-0.5, k[0], v[0], *(rows[0] for rows in given.values()))
    close(got, modeling_kimi_linear.chunk_kimi_delta_attention(q, k, v, chunk_size=8, **given)[0][0])


def test_mamba_2() -> None:
    x, dt, b, c = drawn(ROWS, HEADS, VALUES), drawn(ROWS, HEADS), drawn(ROWS, GROUPS, KEYS), drawn(ROWS, GROUPS, KEYS)
    a, d, dt = -torch.rand(HEADS), torch.randn(HEADS), dt.abs()
    got = rules.mamba2(slots((HEADS, KEYS, VALUES)), x[0], dt[0], a, b[0], c[0], d)
    close(got, modeling_mamba2.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=8, D=d)[0])


def test_mamba_1() -> None:
    x, dt = drawn(VALUES, ROWS), drawn(VALUES, ROWS).abs()
    b, c, a, d = drawn(KEYS, ROWS), drawn(KEYS, ROWS), -torch.rand(VALUES, KEYS), torch.randn(VALUES)
    rows = x[0].T, dt[0].T, a, b[0].T, c[0].T, d
    close(rules.mamba1(slots((KEYS, VALUES)), *rows).T, modeling_mamba.mamba_selective_scan(x, dt, a, b, c, D=d)[0])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(activation: str | None, size: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(VALUES, ROWS).to(dtype), torch.randn(VALUES, size).to(dtype), torch.randn(VALUES).to(dtype)
    got = rules.conv(slots((VALUES, size - 1), dtype), x[0].T.contiguous(), weight, bias, activation).T
    want = modeling_mamba.causal_conv1d_fn(*(t.float() for t in (x, weight, bias)), activation)[0]
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs"), [(silu, functional.silu), (softplus, functional.softplus)])
def test_an_element_has_the_same_bits_wherever_it_is(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(67) * 12
    whole = ours(x)
    assert torch.equal(whole, torch.cat([ours(x[i : i + 1]) for i in range(len(x))]))
    torch.testing.assert_close(whole, theirs(x), rtol=1e-5, atol=1e-6)
