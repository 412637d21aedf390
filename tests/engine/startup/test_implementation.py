"""Which code runs a model: the decoder where the table has it and nothing that is asked for needs transformers."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.kernels import has_triton
from engine.model.decoder.architecture import architecture_of
from engine.startup.build import load
from engine.startup.implementation import Implementation
from models import embedded_target
from tests import zoo

CPU = torch.device("cpu")


def chosen(family: str = "llama", device: torch.device = CPU, shares: int = 1, **config: object) -> str:
    found = Implementation.of(EngineConfig(target="", **config), zoo.family_config(family), device, shares)
    assert (found.architecture is None) == bool(found.why_not)
    return str(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("asked", [{}, {"loop": "rounds"}, {"weights": "fp8"}])
def test_a_family_of_the_table_runs_in_the_decoder(family: str, asked: dict[str, object]) -> None:
    assert chosen(family, **asked) == f"decoder ({zoo.family_config(family).model_type})"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"shares": 2}, "tensor_parallel_size is 2"),
        ({"fuse": False}, "fuse is off"),
        ({"family": "falcon"}, "this falcon is not in the table of architectures"),
        ({"family": "falcon", "fuse": False}, "this falcon is not in the table of architectures"),
    ],
)
def test_what_else_needs_transformers(asked: dict[str, object], why: str) -> None:
    assert chosen(**asked) == f"transformers' module: {why}"


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_so_does_it_on_a_gpu() -> None:
    assert chosen(device=torch.device("cuda")) == "decoder (llama)"


@pytest.mark.parametrize("fuse", [True, False])
def test_what_is_loaded_is_what_was_chosen(fuse: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "engine")
    config = EngineConfig(target=str(embedded_target()), fuse=fuse)
    made = load(config, config.target, None, "native", CPU)
    assert (architecture_of(made) is not None) == fuse
    assert f"runs in: {chosen(fuse=fuse)}" in caplog.text
