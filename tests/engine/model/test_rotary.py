"""Frequencies of rotary positions are those of transformers, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.rotary import RotaryTable, Rotation

ORIGINAL = {"original_max_position_embeddings": st.sampled_from([512, 2048, 8192, 32768])}
FACTOR = {"factor": st.sampled_from([1.0, 2.0, 8.0, 16.5, 32.0])}
MORE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": FACTOR,
    "llama3": FACTOR | ORIGINAL | {"low_freq_factor": st.just(1.0), "high_freq_factor": st.sampled_from([3.0, 4.0])},
    "yarn": FACTOR | ORIGINAL,
}
OF_YARN = {
    "beta_fast": st.sampled_from([16.0, 32.0]), "beta_slow": st.sampled_from([1.0, 2.0]), "mscale": st.just(0.7),
    "mscale_all_dim": st.sampled_from([0.7, 1.0]), "attention_factor": st.just(1.3), "truncate": st.booleans(),
}  # fmt: skip

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 2048}


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(MORE)))
    fixed = {"rope_type": st.just(kind), "rope_theta": st.sampled_from([1e4, 5e5, 1e6, 123456.7]), **MORE[kind]}
    drawn: dict[str, Any] = draw(st.fixed_dictionaries(fixed, optional=OF_YARN if kind == "yarn" else {}))
    return drawn


@example(YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, 64, [5])
@example(YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "truncate": False}, 64, [5])
@given(parameters(), st.sampled_from([16, 32, 64, 80, 128, 256]), st.lists(st.integers(0, 1 << 20), min_size=1))
def test_frequencies_and_tables(found: dict[str, Any], dim: int, positions: list[int]) -> None:
    config = LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, rope_parameters=dict(found))
    theirs = LlamaRotaryEmbedding(config)
    ours, ids = RotaryTable.of(found, dim), torch.tensor(positions)
    assert torch.equal(torch.tensor(ours.frequencies), theirs.inv_freq)
    for dtype in (torch.float32, torch.bfloat16):
        for got, want in zip(Rotation(ours)(ids, dtype), theirs(torch.zeros(1, dtype=dtype), ids[None]), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4}, "rope_type is 'dynamic'; supported: default"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "have no original_max_position_embeddings"),
    ],
)
def test_what_is_refused(found: dict[str, Any], told: str) -> None:
    assert found["rope_type"] in ROPE_INIT_FUNCTIONS
    with pytest.raises(ModelError, match=told):
        RotaryTable.of(found, 64)
