"""A decoder's memory is foretold from shapes, and is what transformers' module of the same weights takes."""

from __future__ import annotations

import pytest
import torch

from engine.model.decoder.families import architecture_for
from engine.model.decoder.memory import num_bytes
from engine.model.linear.grouped import GroupedCodes
from engine.model.published.saved import SavedCodes
from engine.model.quantize import weight_bytes
from engine.startup.precision import on_meta
from tests import zoo

OF_TABLE = [family for family in zoo.FAMILIES if architecture_for(zoo.family_config(family)) is not None]


@pytest.mark.parametrize("family", OF_TABLE)
@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_transformers_module(family: str, weights: str, dtype: torch.dtype) -> None:
    config = zoo.family_config(family)
    architecture = architecture_for(config)
    assert architecture is not None
    rounded = None if weights == "native" else weights
    assert num_bytes(architecture, dtype, rounded, {}) == weight_bytes(on_meta(family, config), dtype, weights)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_codes_that_are_kept_take_their_own_bytes(family: str) -> None:
    architecture = architecture_for(zoo.family_config(family))
    assert architecture is not None
    codes = GroupedCodes(torch.zeros(97, 32, dtype=torch.int8), 8, torch.ones(97, 1, dtype=torch.float16), None)
    plain = num_bytes(architecture, torch.float32, None, {})
    kept = num_bytes(architecture, torch.float32, None, {"model.embed_tokens.weight": SavedCodes(codes)})
    assert plain - kept == 97 * 32 * 4 - codes.nbytes
