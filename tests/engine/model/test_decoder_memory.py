"""A decoder's memory is foretold from shapes, and is what a decoder holds."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pilotfish.engine.choices import Weights
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.load import prepared
from pilotfish.engine.model.decoder.shapes import num_bytes
from pilotfish.engine.model.decoder.weights import TABLE, WeightReader, converted_by
from pilotfish.engine.model.published.base import CodedEmbedding, of_groups
from pilotfish.engine.native.weights import GroupedCodes
from tests import zoo

OF_TABLE = [family for family in zoo.EVERY_FAMILY if architecture_for(zoo.family_config(family)) is not None]
# Which keep vectors that follow from their weights beside them, or have norms without weights.
_MORE = {"falcon-h1", "gemma-3n", "gemma-4", "granite-4", "llama-4", "mamba-2", "nemotron-h", "qwen-3-next", "qwen-3.5"}
_NO_WEIGHTS = re.compile(
    r"\.arrived$|embed_tokens(_per_layer)?\.(embed_)?scale$|^rotations"
)  # of passes, single numbers, rotary tables


@pytest.mark.parametrize("family", OF_TABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_take_what_they_take_in_transformers_module(family: str, dtype: torch.dtype) -> None:
    config = zoo.family_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = [x for name, x in model.named_buffers() if name.endswith(("correction_bias", "layer_scalar"))]
    numbers = sum(weight.numel() for weight in (*model.parameters(), *loaded))
    assert num_bytes(architecture_for(config), dtype, "native", {}) == numbers * dtype.itemsize


def held_and_foretold(model: PreTrainedModel, weights: Weights, *, on_cuda: bool = False) -> tuple[int, int]:
    """Bytes that a decoder of these weights holds, and what is foretold; norms are counted in the model's type."""
    architecture, codes = architecture_for(model.config), dict[str, GroupedCodes]()
    assert architecture is not None
    converted = converted_by(weights, on_cuda=on_cuda)
    rounded = None if converted is not None or weights == "native" else weights
    found = prepared(model.state_dict(), architecture)
    read = WeightReader(found, model.dtype, rounded, packs=False, converted=converted, codes=codes)
    made = DecoderModel(architecture, model.config, read)
    held = {
        id(x): x.numel() * model.dtype.itemsize if name.endswith("norm.scale") else x.nbytes
        for name, x in (*made.named_parameters(), *made.named_buffers())
        if not _NO_WEIGHTS.search(name)
    }
    table = made.get_input_embeddings()
    total = sum(held.values()) + sum(each.nbytes for each in codes.values())
    total += table.codes.num_bytes if isinstance(table, CodedEmbedding) and TABLE not in codes else 0
    return total, num_bytes(architecture, model.dtype, weights, {}, on_cuda=on_cuda)


@pytest.mark.parametrize("family", OF_TABLE)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_codes_take_what_is_foretold(family: str, weights: Weights) -> None:
    held, foretold = held_and_foretold(zoo.reference(family), weights)
    assert 0 <= held - foretold <= (0.05 * held if family in _MORE else 0)


@pytest.mark.parametrize("weights", ["native", "fp8", "int4"])
def test_so_it_is_on_a_gpu(weights: Weights) -> None:
    dense = zoo.config_of("qwen2", hidden_size=256, intermediate_size=400)  # 400: no whole groups
    for config in (dense, zoo.family_config("qwen3-moe")):
        held, foretold = held_and_foretold(zoo.with_large_weights(config).bfloat16(), weights, on_cuda=True)
        assert held == foretold


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_codes_that_are_kept_take_their_own_bytes(family: str) -> None:
    architecture = architecture_for(zoo.family_config(family))
    assert architecture is not None
    codes = GroupedCodes(torch.zeros(97, 32, dtype=torch.int8), 8, torch.ones(97, 1, dtype=torch.float16), None)
    plain = num_bytes(architecture, torch.float32, "native", {})
    kept = num_bytes(architecture, torch.float32, "native", {TABLE: of_groups(codes)})
    assert plain - kept == 97 * 32 * 4 - codes.nbytes
