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

from engine.errors import ModelError
from engine.kv.batch import Feed, RaggedBatch
from engine.recurrent import rules
from engine.recurrent.library import FUNCTIONS
from engine.recurrent.parts import StatePart
from engine.recurrent.plan import ScanPlan
from engine.recurrent.rules import silu, softplus
from engine.recurrent.states import RaggedStates
from engine.types import EMPTY_STATE, StateSpan

ROWS, HEADS, GROUPS, KEYS, VALUES = 21, 4, 2, 6, 5


class Slots:
    """One part of a state, in two slots: the empty one and the one that the pass writes."""

    def of(self, _: int, part: StatePart) -> tuple[Tensor, Tensor]:
        self.states, log = part.tensors(2, 1, torch.device("cpu"))
        return self.states, log


def one_sequence(slots: Slots | None = None) -> RaggedStates:
    feed = Feed([0] * ROWS, 0, [0], state=StateSpan(EMPTY_STATE, 0, 1, ROWS))
    plan = ScanPlan.of(RaggedBatch.of([feed], ROWS, torch.device("cpu")), 1)
    return RaggedStates(plan, slots or Slots(), rules)


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
@pytest.mark.parametrize("normed", [True, False])
def test_gated_delta(heads: int, normed: bool) -> None:
    q, k, v = drawn(ROWS, GROUPS, KEYS), drawn(ROWS, GROUPS, KEYS) / KEYS, drawn(ROWS, heads, VALUES)
    given = {"g": -drawn(ROWS, heads).abs(), "beta": drawn(ROWS, heads).sigmoid(), "use_qk_l2norm_in_kernel": normed}
    ours = FUNCTIONS["torch_chunk_gated_delta_rule"](one_sequence(), q, k, v, **given)
    close(ours[0], in_chunks(q, k, v, **given)[0])


def test_kimi_delta() -> None:
    q, k, v = drawn(ROWS, HEADS, KEYS), drawn(ROWS, HEADS, KEYS), drawn(ROWS, HEADS, VALUES)
    decay, beta = -drawn(ROWS, HEADS, KEYS).abs(), drawn(ROWS, HEADS).sigmoid()
    given = {"g": decay, "beta": beta, "use_qk_l2norm_in_kernel": True}
    ours = FUNCTIONS["chunk_kimi_delta_attention"](one_sequence(), q, k, v, **given)
    close(ours[0], modeling_kimi_linear.chunk_kimi_delta_attention(q, k, v, chunk_size=8, **given)[0])


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.8)])
def test_mamba_2(limit: tuple[float, float]) -> None:
    x, dt, b, c = drawn(ROWS, HEADS, VALUES), drawn(ROWS, HEADS), drawn(ROWS, GROUPS, KEYS), drawn(ROWS, GROUPS, KEYS)
    a, d, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    given = {"chunk_size": 8, "D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": limit}
    ours = FUNCTIONS["mamba2_chunk_scan"](one_sequence(), x, dt, a, b, c, **given)
    close(ours[0], modeling_mamba2.mamba2_chunk_scan(x, dt, a, b, c, **given))


def test_mamba_1() -> None:
    x, dt, z = (drawn(VALUES, ROWS) for _ in range(3))
    b, c, a = drawn(KEYS, ROWS), drawn(KEYS, ROWS), -torch.rand(VALUES, KEYS)
    given = {"D": torch.randn(VALUES), "z": z, "delta_bias": torch.randn(VALUES), "delta_softplus": True}
    ours = FUNCTIONS["mamba_selective_scan"](one_sequence(), x, dt, a, b, c, **given)
    close(ours[0], modeling_mamba.mamba_selective_scan(x, dt, a, b, c, **given))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(activation: str | None, size: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(VALUES, ROWS).to(dtype), torch.randn(VALUES, size).to(dtype), torch.randn(VALUES).to(dtype)
    states = one_sequence()
    states.update_conv_state(x, 0)
    ours = FUNCTIONS["causal_conv1d_fn"](states, x, weight, bias, activation)
    want = modeling_mamba.causal_conv1d_fn(*(t.float() for t in (x, weight, bias)), activation)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, want.to(dtype), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)


def test_the_state_is_the_library_s_last_one() -> None:
    q, k, v = drawn(ROWS, GROUPS, KEYS), drawn(ROWS, GROUPS, KEYS) / KEYS, drawn(ROWS, HEADS, VALUES)
    given = {"g": -drawn(ROWS, HEADS).abs(), "beta": drawn(ROWS, HEADS).sigmoid()}
    slots = Slots()
    FUNCTIONS["torch_chunk_gated_delta_rule"](one_sequence(slots), q, k, v, **given)
    close(slots.states[1], in_chunks(q, k, v, output_final_state=True, **given)[1][0])
    assert not slots.states[EMPTY_STATE].any()


def test_what_is_not_known_is_refused() -> None:
    x, weight = drawn(VALUES, ROWS), torch.randn(VALUES, 3)
    states = one_sequence()
    states.update_conv_state(x, 0)
    with pytest.raises(ModelError, match="the activation gelu"):
        FUNCTIONS["causal_conv1d_fn"](states, x, weight, activation="gelu")
    with pytest.raises(ModelError, match="other inputs"):
        FUNCTIONS["causal_conv1d_fn"](states, x.clone(), weight)
    with pytest.raises(ModelError, match="code of its own"):
        states.update_conv_state(x, 0)


@pytest.mark.parametrize(("ours", "theirs"), [(silu, functional.silu), (softplus, functional.softplus)])
def test_an_element_has_the_same_bits_wherever_it_is(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(67) * 12
    whole = ours(x)
    assert torch.equal(whole, torch.cat([ours(x[i : i + 1]) for i in range(len(x))]))
    torch.testing.assert_close(whole, theirs(x), rtol=1e-5, atol=1e-6)
