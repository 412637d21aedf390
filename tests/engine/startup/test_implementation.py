"""Which code runs a model: the decoder where the table has it and nothing that is asked for needs transformers."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import has_triton
from pilotfish.engine.model.decoder.architecture import architecture_of
from pilotfish.engine.startup.build import load
from pilotfish.engine.startup.implementation import Implementation
from pilotfish.models import embedded_target
from tests import zoo

CPU = torch.device("cpu")


def chosen(family: str = "llama", device: torch.device = CPU, shares: int = 1) -> str:
    found = Implementation.of(EngineConfig(target="", tensor_parallel_size=shares), zoo.family_config(family), device)
    assert (found.architecture is None) == bool(found.why_not) == (found.share is None)
    return str(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_family_of_the_table_runs_in_the_decoder(family: str) -> None:
    assert chosen(family) == chosen(family, shares=2) == f"decoder ({zoo.family_config(family).model_type})"


def test_another_family_needs_transformers_and_is_not_cut() -> None:
    assert chosen("falcon") == "transformers' module: this falcon model is not in the table of architectures"
    with pytest.raises(
        ModelError, match="tensor_parallel_size is 2, which is not supported for falcon: this falcon model is"
    ):
        chosen("falcon", shares=2)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_so_does_it_on_a_gpu() -> None:
    assert chosen(device=torch.device("cuda")) == "decoder (llama)"


def test_what_is_loaded_is_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pilotfish.engine")
    config = EngineConfig(target=str(embedded_target()))
    assert architecture_of(load(config, config.target, None, "native", CPU)) is not None
    assert f"runs in {chosen()}" in caplog.text
