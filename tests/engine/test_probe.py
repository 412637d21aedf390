"""A model that would mix contexts in silence is refused at load, with a reason."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, PreTrainedConfig

from engine.build import assemble
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.runner import load_model
from tests import zoo

TINY = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def refused(config: PreTrainedConfig, tmp_path: object) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        assemble(EngineConfig(target="x"), load_model(str(tmp_path), None, torch.float32, torch.device("cpu")))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
        ("mamba", {"state_size": 4}),
        ("lfm2", {"intermediate_size": 48, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
        (
            "gpt_oss",
            {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2,
             "num_experts_per_tok": 1},
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_refused_with_a_reason(kind: str, extra: dict[str, object], tmp_path: object) -> None:
    reason = refused(AutoConfig.for_model(kind, **{**TINY, **extra}), tmp_path)
    assert len(reason) > 20


def test_one_frequency_table_for_a_whole_batch_is_served_only_where_it_is_the_same_for_all() -> None:
    """Phi-3's longrope picks its table by the longest sequence of the flat batch: refuse what would need the other."""
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = Phi3Config(
        **TINY,
        intermediate_size=48,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    model = zoo.ours(AutoModelForCausalLM.from_config(config).eval())
    assert assemble(EngineConfig(target="phi3"), model).max_model_len == 32
    with pytest.raises(ModelError, match="positions up to 32"):
        assemble(EngineConfig(target="phi3", max_model_len=64), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", zoo.configs())
def test_the_zoo_passes(family: str, dtype: torch.dtype) -> None:
    model = torch.nn.Module.to(zoo.ours(zoo.reference(family)), dtype)
    assemble(EngineConfig(target=family), model)
