"""A model that would mix contexts in silence is refused at load, with a reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pilotfish.engine.attention import reference
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.model.fallback import kv_layout, load_model
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.startup.runners import check_ragged_contract
from tests import zoo
from tests.class_table import RAGGED, way_of
from tests.covering import some

TINY = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def check(model: PreTrainedModel) -> None:
    check_ragged_contract(model, kv_layout(model.config, model.dtype), reference.attend)


@pytest.mark.parametrize(
    ("kind", "extra", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "layer 0 does not use the attention interface"),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, "has no attribute"),
        ("mamba", {"state_size": 4}, "has layer_types linear_attention; supported:"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "has layer_types conv; supported:"),
        ("bert", {"num_key_value_heads": 4}, "differ from those of a plain pass"),
        ("gemma3_text", {"head_dim": 8, "use_bidirectional_attention": True}, "differ from those of a plain pass"),
        ("falcon", {"alibi": True}, "does not use the attention interface"),
        ("doge", {}, "passes its own attention mask"),
        ("recurrent_gemma", {}, "attention interface|linear_attention"),
        ("xglm", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}, "attention interface"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_the_reason_is_specific(kind: str, extra: dict[str, object], reason: str, tmp_path: object) -> None:
    sizes = {**TINY, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**sizes, "pad_token_id": 0, **extra})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises((ModelError, AttributeError), match=reason):
        check(load_model(str(tmp_path), None, torch.float32, torch.device("cpu")))


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    model = zoo.in_transformers(zoo.reference("qwen2-window"))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    model.config.sliding_window = 50  # beyond what the probe runs: only the numbers tell
    with pytest.raises(ModelError, match="layer 1 should have a window of 50; it passed None"):
        check(model)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_rounding_hides_no_wrong_attention(family: str, dtype: torch.dtype) -> None:
    """What is right differs by at most 0.03 of the spread of logits here; the least of these faults by 0.28."""
    model = zoo.in_transformers(zoo.with_large_weights(zoo.family_config(family)).to(dtype))
    check(model)

    def wrong(
        fault: dict[str, Any], query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec
    ) -> Tensor:
        return reference.attend(query, k, v, batch, replace(spec, **fault))

    faults: list[dict[str, Any]] = [{"scale": 1.0}, {"window": 3}, {"softcap": 1.0}]
    for fault in faults:
        with pytest.raises(ModelError, match="differ from those of a plain pass"):
            check_ragged_contract(model, kv_layout(model.config, model.dtype), partial(wrong, fault))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4,
         "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_one_frequency_table_for_a_whole_batch_is_served_only_where_it_is_the_same_for_all(rope: dict) -> None:
    """A Llama with these picks its table by the longest sequence of the flat batch: refuse what would need another."""
    rope = {"rope_theta": 1e4, **rope}
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = zoo.ours(zoo.with_large_weights(LlamaConfig(**TINY, **sizes, rope_parameters=rope)))
    assert assemble(EngineConfig(target="llama"), model).facts.limits.max_model_len == 32
    with pytest.raises(ModelError, match="at most 32 positions"):
        assemble(EngineConfig(target="llama", max_model_len=64), model)


FAMILIES = [family for family in zoo.FAMILIES if family != "phi3-longrope"]  # of which each pass has one table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", some(FAMILIES, FAMILIES[::5]))
def test_the_zoo_passes_in_transformers_module(family: str, dtype: torch.dtype) -> None:
    model = zoo.in_transformers(zoo.with_large_weights(zoo.family_config(family)).to(dtype))
    assert way_of(assemble(EngineConfig(target=family), model)) == RAGGED
