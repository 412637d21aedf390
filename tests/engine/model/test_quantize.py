"""Int8 models: saved and loaded they are bitwise what they were, little memory is taken, and they stay good models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.linear.grouped import GroupedLinear, has_codes
from engine.model.quantize import load_quantised, save_quantised
from engine.model.runner import load_model
from engine.startup.build import load, pick_device
from models import corpus, embedded_target
from models.train import held_out_loss
from server import cli
from tests import zoo
from tests.covering import some
from tests.engine.model.test_fuse import logits

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", some(zoo.families(), ("llama", "gemma3")))
def test_saved_is_bitwise_the_same(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    zoo.reference(family).to(torch.float32).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    save_quantised(str(tmp_path / "model"), None, tmp_path / "int8")
    at_load, saved = (load_quantised(str(tmp_path / name), None, dtype) for name in ("model", "int8"))
    assert torch.equal(logits(at_load), logits(saved))
    assert at_load.dtype == saved.dtype == dtype
    native = logits(load_model(str(tmp_path / "model"), None, dtype, CPU))
    assert float((logits(saved) - native).std()) < 0.15 * float(native.std())


def test_what_is_rounded_and_what_is_not() -> None:
    model = load_quantised(str(embedded_target()), None, torch.bfloat16)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(isinstance(module, GroupedLinear) for module in model.modules()) == 7 * 10 + 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}, "embedding and norms"
    assert logits(model).dtype == torch.float32
    assert model.get_output_embeddings()(torch.zeros(1, 256, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_saved_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    assert cli.main(["quantize", str(embedded_target()), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pilotfish-int8", "version": 3}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        kinds = {key.rpartition(".")[2]: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert kinds == {"weight": torch.bfloat16, "weight_codes": torch.int8, "weight_scale": torch.float16}
    model = load(EngineConfig(target="x"), str(tmp_path / "out"), None, "native", CPU)
    assert has_codes(model), "nobody has to say that it is int8"


def test_it_is_refused_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    save_quantised(str(embedded_target()), None, out)
    assert cli.main(["quantize", str(out), str(tmp_path / "twice")]) == 1
    assert "int8 weights already" in capsys.readouterr().err
    assert cli.main(["quantize", str(embedded_target()), str(out)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert cli.main(["quantize", "/nowhere", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err
    config = EngineConfig(target="x", weights="int8")
    with pytest.raises(ModelError, match="runs on cpu alone; device is cuda"):
        load(config, str(embedded_target()), None, "int8", torch.device("cuda"))
    marked = json.loads((out / "config.json").read_text())
    marked["quantization_config"]["version"] = 99
    (out / "config.json").write_text(json.dumps(marked))
    with pytest.raises(ModelError, match="version 99"):
        load(config, str(out), None, "native", pick_device("cpu"))


def test_missing_weights_are_told(tmp_path: Path) -> None:
    save_quantised(str(embedded_target()), None, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match="lacks 1 of its weights"):
        load_quantised(str(tmp_path / "out"), None, torch.float32)


def loss(weights: str, dtype: str) -> float:
    """Nats per token on code that the model never saw."""
    if weights == "int8":
        model = load_quantised(str(embedded_target()), None, getattr(torch, dtype))
    else:
        model = load_model(str(embedded_target()), None, getattr(torch, dtype), CPU)
    model.set_attn_implementation("sdpa")
    tokenizer = Tokenizer.from_file(str(embedded_target() / "tokenizer.json"))
    return held_out_loss(model, tokenizer, corpus.find(), windows=6)


@pytest.mark.slow
def test_perplexity_stays_within_one_per_cent() -> None:
    plainly = loss("native", "float32")
    for dtype in ("float32", "bfloat16"):
        assert math.exp(loss("int8", dtype) - plainly) < 1.01
