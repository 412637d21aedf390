"""Whole checkpoints: found, filled, refused. Codes stay where a matmul takes them, and floats equal the formula."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, GPT2Config, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from pilotfish.engine.choices import Weights
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.linear.grouped import GroupedLinear, PackedLinear
from pilotfish.engine.model.published.base import CodedEmbedding
from pilotfish.engine.model.published.methods import quantisation_of, read_weights
from pilotfish.engine.model.quantize import save_quantised
from pilotfish.engine.model.runner import end_tokens
from pilotfish.engine.startup.build import load
from pilotfish.engine.startup.check import check
from pilotfish.engine.startup.precision import held_as
from tests import published, zoo
from tests.drawn import numbers
from tests.zoo import logits

CPU = torch.device("cpu")
# By a matmul of a layer, the matrices that it has.
JOINED = {
    "self_attn.q_proj.joined": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj.joined": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def loaded(folder: Path, weights: Weights = "native", **config: object) -> DecoderModel:
    """As a server on a CPU loads it."""
    return cast("DecoderModel", load(EngineConfig(target=str(folder), **config), str(folder), None, weights, CPU))


def floats(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as transformers' module has them."""
    return load_model(str(folder), None, torch.float32, CPU).state_dict()


def matmuls_of(model: nn.Module) -> set[type]:
    """Their kinds."""
    return {type(each) for each in model.modules() if isinstance(each, nn.Linear | PackedLinear | GroupedLinear)}


def check_served(folder: Path, reference: PreTrainedModel, *, keeps: bool) -> DecoderModel:
    """Dequantised, logits have the bits of those of the floats; codes that a server keeps give almost the same."""
    want, native = logits(zoo.as_served(reference)), loaded(folder)
    assert torch.equal(logits(loaded(folder, "dequantised")), want)
    assert (GroupedLinear in matmuls_of(native)) == keeps
    off = (logits(native) - want).std() / want.std()
    assert 0 < off < 0.1 if keeps else off == 0, "rows are rounded, where codes are kept"
    return native


def form(name: str) -> published.Format:
    return published.FORMATS[name]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a small Llama lies in a format; not to be changed."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        published.publish(folder, published.CONFIGS["llama"], form(name))
        return folder

    return made


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


# One for each reader and way to multiply; `test_codes.py` has every form of a matrix.
@pytest.mark.parametrize(
    ("name", "files"),
    [("ct-int8-zeros", 1), ("ct-int4-ordered", 1), ("ct-fp8-rows", 1), ("gptq-8", 1), ("gptq-2", 2), ("awq", 3),
     ("fp8-blocks", 1)],
)  # fmt: skip
def test_native_keeps_every_code_and_dequantised_equals_the_formula(name: str, files: int, tmp_path: Path) -> None:
    reference = published.publish(tmp_path, published.CONFIGS["qwen3"], form(name), files=files)
    assert equal(floats(tmp_path), reference.state_dict())
    native = check_served(tmp_path, reference, keeps=form(name).on_kernels)
    kinds = {GroupedLinear} if form(name).on_kernels else matmuls_of(native.lm_head)
    assert matmuls_of(native.model) == kinds
    assert GroupedLinear not in matmuls_of(native.lm_head)
    codes = read_weights(str(tmp_path), None, quantisation_of("x", read_config(str(tmp_path), None)))
    for number, layer in enumerate(native.model.layers if form(name).on_kernels else ()):
        for matmul, names in JOINED.items():
            paths = [f"model.layers.{number}.{each}" for each in names]
            alone = [
                GroupedLinear(replace(codes[f"{path}.weight"].grouped(), bias=codes.get(f"{path}.bias")))
                for path in paths
            ]
            for made, path in zip(alone, paths, strict=True):
                assert torch.equal(made.codes.dequantised(), reference.get_submodule(path).weight)
            x = numbers(3, alone[0].in_features)
            assert torch.equal(layer.get_submodule(matmul)(x), torch.cat([each(x) for each in alone], -1))


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_what_has_no_codes_or_no_kernel_may_be_rounded_as_asked(name: str, folder_of: Callable[[str], Path]) -> None:
    assert matmuls_of(loaded(folder_of(name), "int8")) == {GroupedLinear}


def test_the_log_reports_kept_and_dequantised_weights(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pilotfish.engine"):
        loaded(folder_of("gptq"))
        loaded(folder_of("fp8-blocks"))
    assert "rounding: the checkpoint's own codes" in caplog.text
    assert "rounding: none" in caplog.text


def publish_experts(folder: Path, config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """A checkpoint with one tensor for each expert, as transformers saves them; returns the float model."""
    model = zoo.with_large_weights(config)
    model.save_pretrained(folder)
    plain, tensors = load_file(folder / "model.safetensors"), {}
    for key, weight in list(plain.items()):
        path, _, kind = key.rpartition(".")
        if kind == "weight" and path.endswith("_proj"):
            written, plain[key] = form(name).write(path, weight)
            tensors |= written
        else:
            tensors[key] = weight
    save_file({key: tensor.contiguous() for key, tensor in plain.items()}, folder / "model.safetensors")
    model.load_state_dict({key: tensor.clone() for key, tensor in floats(folder).items()})
    published.save(folder, config, form(name).settings, tensors)
    return model


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_experts_are_stacked_as_those_of_floats(name: str, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **published.SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    )
    model = publish_experts(tmp_path, config, name)
    assert equal(floats(tmp_path), model.state_dict())
    experts = check_served(tmp_path, model, keeps=form(name).on_kernels).get_submodule("model.layers.0.mlp.experts")
    assert (GroupedLinear in matmuls_of(experts)) == form(name).on_kernels


def test_gpt_oss(tmp_path: Path) -> None:
    config = zoo.config_of(
        "gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    )
    model, tensors = zoo.with_large_weights(config), {}
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                written, plain = published.mxfp4(key, weight)
                tensors |= written
                weight.copy_(plain)
            else:
                tensors[key] = weight
    published.save(tmp_path, config, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    assert equal(floats(tmp_path), model.state_dict())
    check_served(tmp_path, model, keeps=False)


def test_a_matrix_that_is_stored_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's modules are `Conv1D`: its float weights are `[in, out]`, and codes are of `[out, in]` all the same."""
    config = GPT2Config(vocab_size=zoo.VOCAB, n_embd=64, n_layer=1, n_head=4, n_positions=64, eos_token_id=zoo.END)
    model, tensors = zoo.with_large_weights(config), {}
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            path, _, kind = key.rpartition(".")
            if kind == "weight" and path.rpartition(".")[2] in ("c_attn", "c_proj", "c_fc"):
                written, plain = published.gptq(path, weight.t().contiguous())
                tensors |= written
                weight.copy_(plain.t())
            elif key != "lm_head.weight":
                tensors[key] = weight
    published.save(tmp_path, config, form("gptq").settings, tensors)
    assert matmuls_of(check_served(tmp_path, model, keeps=True).model) == {GroupedLinear}


# -- what is wrong is named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is bitsandbytes; supported: awq,"),
        ({"load_in_4bit": True}, "quant_method is bitsandbytes;"),
        ({"bits": 4}, "quant_method is missing;"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with bits 3; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ layout marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ layout marlin"),
        ({"quant_method": "awq", "bits": 8}, "AWQ with bits 8; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "AWQ layout gemv; supported: gemm"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "FP8 format e3m4"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors format marlin-24; supported: pack-quantized,",
        ),
        (
            published.FORMATS["ct-int4"].settings | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with sparsity_config",
        ),
        (
            published.FORMATS["ct-int4"].settings | {"transform_config": {"config_groups": {"R1": {}}}},
            "compressed-tensors with transform_config",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 3}}},
            },
            "compressed-tensors with int weights of 3 bits",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    published.save(tmp_path, published.CONFIGS["llama"], settings, {"lm_head.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match=message):
        held_as(EngineConfig(target=str(tmp_path)), str(tmp_path), None, "native", CPU)


UP = "model.layers.1.mlp.up_proj"
OF_ANOTHER_SHAPE = rf"{UP}.weight has shape \[128, 48\]; expected \[128, 64\]"


def changed(folder: Path, copy: Path, key: str, tensor: torch.Tensor | None) -> Path:
    """A copy with another tensor of this name, or none."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors[key]
    save_file(tensors | ({} if tensor is None else {key: tensor}), copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("name", "weights", "key", "tensor", "message"),
    [
        *(("ct-int8", weights, f"{UP}.weight", torch.zeros(128, 48, dtype=torch.int8), OF_ANOTHER_SHAPE)
          for weights in ("native", "dequantised")),
        ("gptq", "native", f"{UP}.scales", None, rf"has .* but no {UP}\.scales"),
        ("gptq", "native", f"{UP}.qweight", None, rf"is missing 1 weights, including {UP}\.weight"),
        ("gptq", "native", "model.norm.weight", None, r"is missing 1 weights, including model\.norm\.weight"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    name: str, weights: str, key: str, tensor: torch.Tensor | None, message: str,
    folder_of: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    folder = changed(folder_of(name), tmp_path / "copy", key, tensor)
    with pytest.raises(ModelError, match=message):
        loaded(folder, weights)


def test_only_others_checkpoints_are_dequantised_and_only_floats_are_saved_or_cut(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    zoo.reference("llama").save_pretrained(tmp_path / "floats")
    save_quantised(tmp_path / "floats", None, tmp_path / "ours")
    with pytest.raises(ModelError, match=r"weights is dequantised; .* is saved in int8"):
        loaded(tmp_path / "ours", "dequantised")
    folder = str(folder_of("gptq"))
    with pytest.raises(ModelError, match="already has gptq weights"):
        save_quantised(folder, None, tmp_path / "out")
    for name, method in ((folder, "gptq"), (str(tmp_path / "ours"), "int8")):
        with pytest.raises(ModelError, match=f"tensor_parallel_size is 2; .* {method} weights, which cannot be sh"):
            held_as(EngineConfig(target=name, tensor_parallel_size=2), name, None, "native", CPU)


# -- what is told before it is loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [("gptq", "native"), ("gptq", "dequantised"), ("gptq", "int8"), ("ct-int8", "native"), ("fp8-blocks", "int8")],
)
def test_check_reports_the_memory_of_the_model(name: str, weights: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    report = check(EngineConfig(target=str(folder), weights=weights), load=False)
    assert report.problems == []
    said = report.as_dict()["target"]["weights"]
    model = loaded(folder, weights)
    parts = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "rotations" not in name)]
    table = model.get_input_embeddings()
    parts += [m.packed or m.codes for m in model.modules() if isinstance(m, PackedLinear | GroupedLinear)]
    held = sum(part.nbytes for part in parts) + (table.codes.num_bytes if isinstance(table, CodedEmbedding) else 0)
    size, unit = said.split()[:2]
    assert unit == "MiB"
    assert float(size) == pytest.approx(held / 2**20, rel=0.02, abs=0.06)
    codes = f"{form(name).settings['quant_method']} codes"
    assert (codes in said) == (form(name).on_kernels and weights != "dequantised")


def test_the_doctor_names_what_is_missing(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(folder_of("gptq"), tmp_path / "copy", f"{UP}.qzeros", None)
    report = check(EngineConfig(target=str(folder)), load=False)
    assert any(f"but no {UP}.qzeros" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("name", "weights", "cpu", "cuda"),
    [
        ("gptq", "native", ("float32", "gptq codes"), ("bfloat16", "native")),
        ("gptq", "dequantised", ("bfloat16", "native"), ("bfloat16", "native")),
        ("gptq", "int8", ("float32", "gptq codes and int8"), None),
        ("fp8-blocks", "native", ("bfloat16", "native"), ("bfloat16", "native")),
        ("fp8-blocks", "int8", ("float32", "int8"), None),
    ],
)
def test_how_it_is_held(
    name: str, weights: str, cpu: tuple[str, str], cuda: tuple[str, str] | None,
    folder_of: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    folder = shutil.copytree(folder_of(name), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    target = EngineConfig(target=str(folder))
    for device, want in ((CPU, cpu), (torch.device("cuda"), cuda)):
        if want is not None:
            held = held_as(target, target.target, None, weights, device, multiplies=lambda _: True)
            assert (held.type_name, held.matrices) == want


def test_end_tokens_are_those_of_its_generation_config(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("gptq"), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert end_tokens(loaded(folder)) == {5, 7}
    assert end_tokens(load_model(str(folder), None, torch.float32, CPU)) == {5, 7}


def test_codes_of_the_language_model_of_a_checkpoint_that_also_sees(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mistral", **published.SIZES)
    reference = published.publish(tmp_path, config, form("awq"))
    file, inside = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = {f"language_model.{key}": value for key, value in load_file(file).items()}
    save_file(tensors | {"vision_tower.ln_pre.weight": torch.ones(4)}, file, metadata={"format": "pt"})
    settings, tied = inside.pop("quantization_config"), {"tie_word_embeddings": False}
    whole = {"model_type": "mistral3", "text_config": inside, "quantization_config": settings, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(whole | tied))
    assert equal(floats(tmp_path), reference.state_dict())
    check_served(tmp_path, reference, keeps=True)
