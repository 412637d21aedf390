"""Int8 models: saved and loaded they are bitwise what they were, little memory is taken, and they stay good models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors import safe_open
from torch import nn

from pilotfish.engine.choices import Rounded, Weights
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.linear.grouped import GroupedLinear, PackedLinear
from pilotfish.engine.model.published.base import CodedEmbedding
from pilotfish.engine.model.quantize import save_quantised
from pilotfish.engine.startup.build import load, pick_device
from pilotfish.models import embedded_target
from pilotfish.server import cli
from tests import zoo
from tests.engine.model.test_decoder import CASES, _model, _runner, feed
from tests.zoo import logits

CPU = torch.device("cpu")


def loaded(folder: Path, weights: Weights = "native", dtype: str = "float32") -> DecoderModel:
    """As a server on a CPU loads it."""
    return cast("DecoderModel", load(EngineConfig(target="x", dtype=dtype), str(folder), None, weights, CPU))


@pytest.mark.parametrize(
    ("family", "weights", "dtype"),
    [
        ("llama", "int8", "float32"),
        ("gemma3", "int8", "bfloat16"),
        ("gpt2", "int4", "float32"),  # matrices `[inputs, outputs]`
        ("mixtral", "int4", "float32"),  # an expert's matrices one by one
        ("gpt-oss", "int8", "float32"),  # in stacks, `[inputs, outputs]`
    ],
)
def test_saved_is_bitwise_the_same(family: str, weights: Rounded, dtype: str, tmp_path: Path) -> None:
    zoo.reference(family).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    save_quantised(str(tmp_path / "model"), None, tmp_path / "saved", weights)
    at_load, saved = loaded(tmp_path / "model", weights, dtype), loaded(tmp_path / "saved", dtype=dtype)
    got = logits(saved)
    assert torch.equal(logits(at_load), got)
    assert at_load.dtype == saved.dtype == getattr(torch, dtype)
    if weights == "int8":
        native = logits(loaded(tmp_path / "model", dtype=dtype))
        assert 0 < float((got - native).std()) < 0.15 * float(native.std())


def test_stacks_of_another_name_are_saved_too(tmp_path: Path) -> None:
    """Granite's are the weights of modules."""
    zoo.reference("granite-4").save_pretrained(tmp_path / "model")
    save_quantised(str(tmp_path / "model"), None, tmp_path / "saved")
    models = loaded(tmp_path / "model", "int8"), loaded(tmp_path / "saved")
    given = torch.randn(1, 5, 32)
    first, second = (model.get_submodule("model.layers.1.mlp")(given) for model in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "part"), [("dbrx", ".experts.5.down_proj"), ("sarvam_moe", ".k_proj"), ("lara_mini", ".k_proj")]
)
def test_matrices_that_a_checkpoint_has_in_one_are_saved_one_by_one(kind: str, part: str, tmp_path: Path) -> None:
    _model(kind, CASES[kind][0]).save_pretrained(tmp_path / "model")
    save_quantised(str(tmp_path / "model"), None, tmp_path / "saved")
    at_load, saved = loaded(tmp_path / "model", "int8"), loaded(tmp_path / "saved")
    text = [(7 * i + 3) % zoo.VOCAB for i in range(30)]
    got, want = (_runner(model).forward([feed(text, range(30), 0, 30)]) for model in (saved, at_load))
    assert torch.equal(got, want)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        names = {key.rpartition(".")[0] for key in file.keys() if key.endswith("weight_codes")}  # noqa: SIM118
    assert any(name.endswith(part) for name in names)


def test_what_is_rounded_and_what_is_not() -> None:
    model = loaded(embedded_target(), "int8", "bfloat16")
    matmuls = [module for module in model.modules() if isinstance(module, nn.Linear | PackedLinear | GroupedLinear)]
    assert {type(matmul) for matmul in matmuls} == {GroupedLinear}
    assert len(matmuls) == 4 * 10 + 1, "of queries, keys and values one, and of gate and up"
    table, head, ids = model.get_input_embeddings(), model.get_output_embeddings(), torch.tensor([[3, 9, 700]])
    assert isinstance(table, CodedEmbedding)
    assert (table.codes.grouped().codes is head.codes.codes) == model.config.tie_word_embeddings
    assert torch.equal(table(ids)[0], table.codes.dequantised()[ids[0]].bfloat16())
    assert logits(model).dtype == torch.float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target, by the command."""
    out = tmp_path_factory.mktemp("saved") / "out"
    assert cli.main(["quantize", str(embedded_target()), str(out)]) == 0
    return out


def test_a_saved_checkpoint_is_marked(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pilotfish-int8", "version": 3}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {
        path.name for path in saved.iterdir()
    }
    with safe_open(saved / "model.safetensors", "pt") as file:
        kinds = {key.rpartition(".")[2]: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert kinds == {"weight": torch.bfloat16, "weight_codes": torch.int8, "weight_scale": torch.float16}
    assert any(isinstance(m, GroupedLinear) for m in loaded(saved).modules()), "nobody has to say that it is int8"


def test_it_is_refused_with_a_reason(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, out, told in (
        (saved, tmp_path / "twice", "already has int8 weights"),
        (embedded_target(), saved, "not empty"),
        ("/nowhere", tmp_path / "none", "no such folder"),
    ):
        assert cli.main(["quantize", str(source), str(out)]) == 1
        assert told in capsys.readouterr().err
    config = EngineConfig(target="x", weights="int8")
    with pytest.raises(ModelError, match="requires cpu; device is cuda"):
        load(config, str(embedded_target()), None, "int8", torch.device("cuda"))
    marked = json.loads((saved / "config.json").read_text())
    marked["quantization_config"]["version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(marked))
    with pytest.raises(ModelError, match="version 99"):
        load(config, str(tmp_path), None, "native", pick_device("cpu"))
