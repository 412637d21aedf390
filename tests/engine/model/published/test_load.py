"""Whole checkpoints: found, filled, refused. Codes stay where a matmul takes them, and floats equal the formula."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, GPT2Config, PreTrainedConfig, Qwen3MoeConfig

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.linear.embedding import CodedEmbedding
from engine.model.linear.grouped import GroupedLinear
from engine.model.quantize import save_quantised
from engine.startup.build import load
from engine.startup.doctor import check
from engine.startup.precision import held_as
from tests import published, zoo

CPU = torch.device("cpu")


def loaded(folder: Path, weights: str = "native", **config: object):
    return load(EngineConfig(target=str(folder), fuse=False, **config), str(folder), None, weights, CPU)


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
    assert equal(loaded(tmp_path, "dequantised").state_dict(), reference.state_dict())
    model = loaded(tmp_path)
    for path, module in reference.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head" and form(name).on_kernels:
            made = model.get_submodule(path)
            assert isinstance(made, GroupedLinear)
            assert torch.equal(made.dequantised(), module.weight)
            assert (made.bias is None) == (module.bias is None)
            assert made.bias is None or torch.equal(made.bias, module.bias)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_what_has_no_codes_or_no_kernel_may_be_rounded_as_asked(name: str, folder_of: Callable[[str], Path]) -> None:
    model = loaded(folder_of(name), "int8")
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_the_log_says_what_is_kept_and_what_is_not(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine"):
        loaded(folder_of("gptq"))
        loaded(folder_of("fp8-blocks"))
    assert "14 quantised weights, 14 keep their codes" in caplog.text
    assert "14 quantised weights, 0 keep their codes; 14 are dequantised to float32" in caplog.text


def publish_experts(folder: Path, config: PreTrainedConfig, name: str) -> dict[str, torch.Tensor]:
    """A checkpoint with one tensor for each expert, as transformers saves them; returns the float state."""
    model = zoo.with_large_weights(config)
    model.save_pretrained(folder)
    floats, tensors = load_file(folder / "model.safetensors"), {}
    for key, weight in list(floats.items()):
        path, _, kind = key.rpartition(".")
        if kind == "weight" and path.endswith("_proj"):
            written, floats[key] = form(name).write(path, weight)
            tensors |= written
        else:
            tensors[key] = weight
    save_file({key: tensor.contiguous() for key, tensor in floats.items()}, folder / "model.safetensors")
    plain = {key: tensor.clone() for key, tensor in loaded(folder).state_dict().items()}
    published.save(folder, config, form(name).settings, tensors)
    return plain


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_experts_are_stacked_as_those_of_floats(name: str, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **published.SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    )
    want = publish_experts(tmp_path, config, name)
    assert equal(loaded(tmp_path, "dequantised").state_dict(), want)
    if form(name).on_kernels:
        kept = loaded(tmp_path)
        assert isinstance(kept.model.layers[0].self_attn.q_proj, GroupedLinear)
        assert torch.equal(
            kept.state_dict()["model.layers.0.mlp.experts.down_proj"], want["model.layers.0.mlp.experts.down_proj"]
        )


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
    assert equal(loaded(tmp_path).state_dict(), model.state_dict())


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
    want, got = model.state_dict(), loaded(tmp_path, "dequantised").state_dict()
    assert all(torch.equal(got[key], want[key]) for key in want)
    kept = loaded(tmp_path).transformer.h[0].attn.c_proj
    assert torch.equal(kept.dequantised().t(), want["transformer.h.0.attn.c_proj.weight"])


# -- what is wrong is named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is quantised by bitsandbytes; Pilotfish reads awq,"),
        ({"load_in_4bit": True}, "is quantised by bitsandbytes;"),
        ({"bits": 4}, "is quantised by an unnamed method;"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with bits 3; Pilotfish reads 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the layout marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ in the layout marlin"),
        ({"quant_method": "awq", "bits": 8}, "AWQ with bits 8; Pilotfish reads 4"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "AWQ in the layout gemv; Pilotfish reads gemm"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "FP8 of the kind e3m4"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors in the format marlin-24; Pilotfish reads pack-quantized,",
        ),
        (
            published.FORMATS["ct-int4"].settings | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with a sparsity_config",
        ),
        (
            published.FORMATS["ct-int4"].settings | {"transform_config": {"config_groups": {"R1": {}}}},
            "compressed-tensors with a transform_config",
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
OF_ANOTHER_SHAPE = rf"{UP}.weight is of shape \[128, 48\]; its config says \[128, 64\]"


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
        ("gptq", "native", f"{UP}.scales", None, rf"lacks {UP}\.scales, which belongs to"),
        ("gptq", "native", f"{UP}.qweight", None, rf"lacks 1 of its weights, {UP}\.weight among"),
        ("gptq", "native", "model.norm.weight", None, r"lacks 1 of its weights, model\.norm\.weight among them"),
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
    with pytest.raises(ModelError, match="is saved in int8, and only checkpoints of others are dequantised"):
        loaded(tmp_path / "ours", "dequantised")
    folder = str(folder_of("gptq"))
    with pytest.raises(ModelError, match="has gptq weights already"):
        save_quantised(folder, None, tmp_path / "out")
    for name, method in ((folder, "gptq"), (str(tmp_path / "ours"), "int8")):
        config = EngineConfig(target=name, tensor_parallel_size=2)
        with pytest.raises(
            ModelError, match=rf"tensor_parallel_size is 2; .* has {method} weights, which cannot be cut"
        ):
            load(config, name, None, "native", CPU, shares=2)


# -- what is told before it is loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [("gptq", "native"), ("gptq", "dequantised"), ("gptq", "int8"), ("ct-int8", "native"), ("fp8-blocks", "int8")],
)
def test_the_doctor_knows_how_much_memory_it_will_take(
    name: str, weights: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(name)
    report = check(EngineConfig(target=str(folder), weights=weights), load=False)
    assert report.problems == []
    said = report.as_dict()["target"]["weights"]
    model = loaded(folder, weights)
    held = sum(
        tensor.nbytes for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "inv_freq" not in n)]
    )
    coded = [module for module in model.modules() if isinstance(module, GroupedLinear | CodedEmbedding)]
    held += sum(module.codes.nbytes for module in coded if module.codes is not None)
    size, unit = said.split()[:2]
    assert unit == "MiB"
    assert float(size) == pytest.approx(held / 2**20, rel=0.02, abs=0.06)
    codes = f"{form(name).settings['quant_method']} codes"
    assert (codes in said) == (form(name).on_kernels and weights != "dequantised")


def test_the_doctor_names_what_is_missing(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(folder_of("gptq"), tmp_path / "copy", f"{UP}.qzeros", None)
    report = check(EngineConfig(target=str(folder)), load=False)
    assert any(f"lacks {UP}.qzeros" in problem for problem in report.problems)


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
    assert loaded(folder).generation_config.eos_token_id == [5, 7]


def test_codes_of_the_language_model_of_a_checkpoint_that_also_sees(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mistral", **published.SIZES)
    want = published.publish(tmp_path, config, form("awq")).state_dict()
    file, inside = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = {f"language_model.{key}": value for key, value in load_file(file).items()}
    save_file(tensors | {"vision_tower.ln_pre.weight": torch.ones(4)}, file, metadata={"format": "pt"})
    settings, tied = inside.pop("quantization_config"), {"tie_word_embeddings": False}
    whole = {"model_type": "mistral3", "text_config": inside, "quantization_config": settings, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(whole | tied))
    assert equal(loaded(tmp_path, "dequantised").state_dict(), want)
    assert isinstance(loaded(tmp_path).model.layers[0].mlp.up_proj, GroupedLinear)
