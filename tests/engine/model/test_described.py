"""Configs that are read without transformers have the fields that transformers' have, and leave it the strange ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.decoder.families.described import ModelConfig, described_by
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.models import embedded_eagle, embedded_target

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 14, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "bos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
MOVED = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}  # into `rope_parameters`
# As published files have them: by model type, what stands beside the sizes.
READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA_3}, "tie_word_embeddings": True}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "head_dim": 32}),
    ("llama", {"num_key_value_heads": None, "eos_token_id": [2, 3], "torch_dtype": None}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 9, "head_dim": 32}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 3}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}),
    ("qwen3", {"head_dim": 16, "attention_bias": False}),
    ("gemma", {"head_dim": 16, "hidden_act": "gelu"}),
    ("gemma2", GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": None}),
    ("gemma3_text", GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ("gemma3_text", GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3}),
]
# A number that is missing or of another type, and what the table does not compute.
LEFT: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {}),
    ("llama", {"hidden_size": "64"}),
    ("llama", {"hidden_size": True}),
    ("llama", {"hidden_size": 62}),
    ("llama", {"rms_norm_eps": None}),
    ("llama", {"num_hidden_layers": None}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("mistral", {}),
    ("qwen3", {}),
    ("gemma", {"head_dim": 16, "use_bidirectional_attention": True}),
]


@pytest.mark.parametrize(("kind", "more"), READ)
def test_fields_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    table = {"model_type": kind, **SIZES, **more}
    want, got = AutoConfig.for_model(**json.loads(json.dumps(table))), described_by(table)
    assert got is not None
    read = {name: value for name, value in vars(got).items() if name not in MOVED and hasattr(want, name)}
    assert read == {name: getattr(want, name) for name in read}
    assert architecture_for(got) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "change"), LEFT)
def test_what_is_strange_is_left_to_transformers(kind: str, change: dict[str, Any]) -> None:
    assert described_by({"model_type": kind, **SIZES, **change}) is None


@pytest.mark.parametrize("name", sorted(SIZES.keys() - {"torch_dtype"}))
def test_so_is_a_config_that_lacks_a_number(name: str) -> None:
    table = {"model_type": "qwen3", "head_dim": 16, **SIZES}
    assert described_by(table) is not None
    del table[name]
    assert described_by(table) is None


@pytest.mark.parametrize("head", [False, True], ids=["alone", "EAGLE"])
def test_a_model_of_the_table_is_served_without_transformers_or_compilers(head: bool) -> None:
    """Their imports take seconds; the compilers of torch are imported by any operation on its meta device."""
    drafts = f", draft={str(embedded_eagle())!r}, speculation='fixed'" if head else ""
    assert isinstance(read_config(str(embedded_target()), None), ModelConfig)
    program = (
        "import sys; from pilotfish.engine import LLM, SamplingParams; "
        f"llm = LLM({str(embedded_target())!r}, device='cpu', kv_memory=0.01{drafts}); "
        "[done] = llm.generate([[5, 6]], SamplingParams(max_tokens=9, ignore_eos=True)); "
        f"assert len(done.token_ids) == 9 and done.stats.drafted >= {int(head)}; "
        "print(sorted({'transformers', 'torch._dynamo', 'torch._inductor'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.stdout.strip(), found.returncode) == ("[]", 0), found.stderr


def test_transformers_class_is_there_for_who_asks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    ours, theirs = (read_config(str(tmp_path), None, of_transformers=them) for them in (False, True))
    assert isinstance(ours, ModelConfig)
    assert theirs.to_dict()["hidden_size"] == ours.hidden_size
