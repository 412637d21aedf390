"""Int8 models: saved and loaded they are bitwise what they were, little memory is taken, and they stay good models."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from engine.choices import Rounded
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.fallback import load_model
from engine.model.linear.embedding import CodedEmbedding
from engine.model.linear.grouped import GroupedLinear, has_codes
from engine.model.quantize import load_quantised, save_quantised, weight_bytes
from engine.startup.build import load, pick_device
from models import embedded_target
from server import cli
from tests import zoo
from tests.zoo import logits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "weights", "dtype"),
    [
        ("llama", "int8", torch.float32),
        ("gemma3", "int8", torch.bfloat16),
        ("mixtral", "int4", torch.float32),
    ],
)
def test_saved_is_bitwise_the_same_and_as_large_as_foretold(
    family: str, weights: Rounded, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = zoo.reference(family)
    plain.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    save_quantised(str(tmp_path / "model"), None, tmp_path / "saved", weights)
    at_load, saved = (load_quantised(str(tmp_path / name), None, dtype, weights) for name in ("model", "saved"))
    coded = [module for module in saved.modules() if isinstance(module, GroupedLinear | CodedEmbedding)]
    held = sum(codes.nbytes for codes in {id(each.codes): each.codes for each in coded}.values())
    held += sum(parameter.nbytes for parameter in saved.parameters())
    assert held == weight_bytes(copy.deepcopy(plain), dtype, weights)
    assert torch.equal(logits(at_load), logits(saved))
    assert at_load.dtype == saved.dtype == dtype
    if weights == "int8":
        native = logits(load_model(str(tmp_path / "model"), None, dtype, CPU))
        assert float((logits(saved) - native).std()) < 0.15 * float(native.std())


def test_what_is_rounded_and_what_is_not() -> None:
    model = load_quantised(str(embedded_target()), None, torch.bfloat16)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(isinstance(module, GroupedLinear) for module in model.modules()) == 7 * 10 + 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}, "norms"
    table, head, ids = model.get_input_embeddings(), model.get_output_embeddings(), torch.tensor([[3, 9, 700]])
    assert isinstance(table, CodedEmbedding)
    assert (table.codes.codes is head.codes.codes) == model.config.tie_word_embeddings
    assert torch.equal(table(ids)[0], table.codes.dequantised()[ids[0]].bfloat16())
    assert logits(model).dtype == torch.float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target, by the command."""
    out = tmp_path_factory.mktemp("saved") / "out"
    assert cli.main(["quantize", str(embedded_target()), str(out)]) == 0
    return out


def test_a_saved_checkpoint_says_what_it_is(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pilotfish-int8", "version": 3}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {
        path.name for path in saved.iterdir()
    }
    with safe_open(saved / "model.safetensors", "pt") as file:
        kinds = {key.rpartition(".")[2]: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert kinds == {"weight": torch.bfloat16, "weight_codes": torch.int8, "weight_scale": torch.float16}
    model = load(EngineConfig(target="x"), str(saved), None, "native", CPU)
    assert has_codes(model), "nobody has to say that it is int8"


def test_it_is_refused_with_a_reason(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, out, told in (
        (saved, tmp_path / "twice", "int8 weights already"),
        (embedded_target(), saved, "not empty"),
        ("/nowhere", tmp_path / "none", "no such folder"),
    ):
        assert cli.main(["quantize", str(source), str(out)]) == 1
        assert told in capsys.readouterr().err
    config = EngineConfig(target="x", weights="int8")
    with pytest.raises(ModelError, match="runs on cpu alone; device is cuda"):
        load(config, str(embedded_target()), None, "int8", torch.device("cuda"))
    marked = json.loads((saved / "config.json").read_text())
    marked["quantization_config"]["version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(marked))
    with pytest.raises(ModelError, match="version 99"):
        load(config, str(tmp_path), None, "native", pick_device("cpu"))
