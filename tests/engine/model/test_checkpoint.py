"""What can be loaded from a folder, and in which words the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BartForCausalLM, BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.runner import end_tokens
from tests import zoo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint."""
    zoo.reference("llama").save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> torch.nn.Module:
    return load_model(str(folder), None, torch.float32, torch.device("cpu"))


def test_end_tokens_come_from_the_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    assert end_tokens(load(folder)) == {2, 7}
    (folder / "generation_config.json").unlink()
    assert end_tokens(load(folder)) == {zoo.END}


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _norm(folder: Path, weight: torch.Tensor | None = None) -> None:
    """Another weight of the last norm, or none."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    if weight is not None:
        weights["model.norm.weight"] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _replaced(model: torch.nn.Module, folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    model.save_pretrained(folder)


def _t5(folder: Path) -> None:
    config = T5Config(vocab_size=97, d_model=32, num_layers=1, num_heads=2, d_ff=48, d_kv=16)
    _replaced(T5ForConditionalGeneration(config), folder)


def _bart(folder: Path) -> None:
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    _replaced(BartForCausalLM(BartConfig(vocab_size=97, d_model=32, add_cross_attention=True, **sizes)), folder)


def _headless(folder: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    _replaced(BertModel(BertConfig(vocab_size=97, hidden_size=32, **sizes)), folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_pickled, r"only pickled weights \(pytorch_model\.bin\), which can run code"),
        (_norm, r"is missing 1 weights, including model\.norm\.weight"),
        (lambda folder: _norm(folder, torch.zeros(3)), r"model\.norm\.weight has shape \[3\]; expected \[32\]"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (_t5, "t5 model; expected a causal language model"),
        (_bart, "with cross-attention"),
        (_headless, "is missing 6 weights"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_refused_with_a_reason(spoil: object, reason: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=reason) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_no_model_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load model"):
        read_config(str(tmp_path / "nowhere"), None)
