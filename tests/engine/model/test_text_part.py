"""The language model of a checkpoint that also sees: the same logits as the whole gives for text."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key

from pilotfish.engine.llm import LLM
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.text_part import names_in_whole, text_part
from pilotfish.engine.params import SamplingParams
from tests import zoo
from tests.covering import some
from tests.families import generate

NEW_TOKENS = 8
_SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_HEADS = {"num_attention_heads": 2}
_QWEN_SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_BY_COORDINATE = {"rope_type": "default", "rope_theta": 1e4}
# By type of the whole its class, its vision, and its text beside the common sizes.
_WHOLES = {
    "gemma3": ("Gemma3ForConditionalGeneration", _SEES | _HEADS, {"head_dim": 16, "sliding_window": 9}),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        _SEES | _HEADS | {"model_type": "pixtral"},
        {"model_type": "mistral", "head_dim": 16},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _QWEN_SEES,
        {"rope_parameters": _BY_COORDINATE | {"mrope_section": [1, 1, 2]}},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        _QWEN_SEES | {"deepstack_visual_indexes": [0]},
        {"head_dim": 16, "rope_parameters": _BY_COORDINATE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        _SEES | _HEADS | {"model_type": "siglip2_vision_model"},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    ),
    "idefics3": ("Idefics3ForConditionalGeneration", _SEES | _HEADS, {"model_type": "llama"}),
}


def whole_of(kind: str) -> PreTrainedModel:
    """A tiny model of this type with all its parts."""
    name, sees, text = _WHOLES[kind]
    made = type(AutoConfig.for_model(kind))
    config = made(text_config=zoo.COMMON | {"pad_token_id": 0} | text, **{"vision_config": sees} if sees else {})
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize("kind", some(_WHOLES, ("gemma3", "qwen3_vl")))
def test_its_tokens_are_those_of_the_whole(tmp_path, kind):
    whole = whole_of(kind)
    whole.save_pretrained(tmp_path)
    llm = LLM(tmp_path, proposer="none", dtype="float32", max_model_len=128, threads=1, device="cpu")
    assert read_config(str(tmp_path), None).part_of == kind
    want = [generate(whole, prompt, NEW_TOKENS) for prompt in zoo.prompts(3)]
    got = llm.generate(zoo.prompts(3), SamplingParams(max_tokens=NEW_TOKENS))
    assert [list(output.token_ids) for output in got] == want


def as_if_alone(config: PreTrainedConfig, weights: dict[str, object]) -> dict[str, object]:
    """Weights by the names that transformers gives them as it loads them."""
    rules = [WeightRenaming(whole, alone) for whole, alone in (names_in_whole(config) or {}).items()]
    return {rename_source_key(name, rules, [])[0]: weight for name, weight in weights.items()}


def test_names_in_the_whole():
    part = text_part(AutoConfig.for_model("mistral3", text_config={"model_type": "mistral"}))
    names = {
        "language_model.model.layers.0.mlp.up_proj.qweight": "model.layers.0.mlp.up_proj.qweight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.text_model.norm.weight": "model.norm.weight",
        "vision_tower.patch_conv.weight": "vision_tower.patch_conv.weight",
    }
    assert as_if_alone(part, {name: name for name in names}) == {alone: name for name, alone in names.items()}
    assert as_if_alone(part, {"lm_head.weight": 1}) == {"lm_head.weight": 1}


def test_the_part_inherits_fields_of_the_whole():
    whole = AutoConfig.for_model("mistral3", text_config={"model_type": "mistral"}, eos_token_id=7)
    whole.quantization_config = {"quant_method": "gptq"}
    part = text_part(whole)
    assert (part.model_type, part.eos_token_id, part.quantization_config) == ("mistral", 7, {"quant_method": "gptq"})


def test_a_language_model_alone_is_no_part():
    config = LlamaConfig()
    assert text_part(config) is config
    assert names_in_whole(config) is None
    assert as_if_alone(config, {"language_model.x": 1}) == {"language_model.x": 1}
