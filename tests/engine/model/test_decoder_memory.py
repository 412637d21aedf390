"""A decoder's memory is foretold from shapes, and is what transformers' module of the same weights takes."""

from __future__ import annotations

import pytest
import torch

from engine.model.decoder.families.table import architecture_for
from engine.model.decoder.memory import num_bytes
from engine.model.linear.grouped import GroupedCodes
from engine.model.published.saved import SavedCodes
from engine.model.quantize import weight_bytes
from engine.startup.precision import on_meta
from tests import zoo

OF_TABLE = [family for family in zoo.FAMILIES if architecture_for(zoo.family_config(family)) is not None]


@pytest.mark.parametrize("family", OF_TABLE)
@pytest.mark.parametrize("weights", ["native", "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_transformers_module(family: str, weights: str, dtype: torch.dtype) -> None:
    config = zoo.family_config(family)
    architecture = architecture_for(config)
    assert architecture is not None
    if weights == "fp8" and architecture.transposed:  # of which transformers' own class of matrices is not rounded
        weights = "native"
    assert num_bytes(architecture, dtype, weights, {}) == weight_bytes(on_meta(family, config), dtype, weights)


@pytest.mark.parametrize("weights", ["native", "fp8", "int4"])
def test_so_it_is_on_a_gpu(weights: str) -> None:
    config = zoo.config_of("qwen2", hidden_size=256, intermediate_size=400)  # 400: no whole groups
    architecture, dtype = architecture_for(config), torch.bfloat16
    assert architecture is not None
    found = num_bytes(architecture, dtype, weights, {}, on_cuda=True)
    assert found == weight_bytes(on_meta("qwen2", config), dtype, weights, on_cuda=True)
    assert (found < num_bytes(architecture, dtype, "native", {})) == (weights != "native")


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_codes_that_are_kept_take_their_own_bytes(family: str) -> None:
    architecture = architecture_for(zoo.family_config(family))
    assert architecture is not None
    codes = GroupedCodes(torch.zeros(97, 32, dtype=torch.int8), 8, torch.ones(97, 1, dtype=torch.float16), None)
    plain = num_bytes(architecture, torch.float32, "native", {})
    kept = num_bytes(architecture, torch.float32, "native", {"model.embed_tokens.weight": SavedCodes(codes)})
    assert plain - kept == 97 * 32 * 4 - codes.nbytes
