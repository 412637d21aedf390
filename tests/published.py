"""Checkpoints as others publish them, of random codes: written here by the published layouts, beside what they mean.

Each writer returns the tensors of one matrix and the matrix in float32 by the format's own formula. What the formats'
own libraries wrote lies in `data/published.safetensors`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from tests import zoo

Tensors = dict[str, Tensor]
Written = tuple[Tensors, Tensor]
GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """One way to publish: the `quantization_config`, and the writer of a matrix `[out, in]`."""

    settings: dict[str, Any]
    write: Callable[[str, Tensor], Written]
    on_kernels: bool = True


def words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers `[n, k]` -> int32 `[n, k * bits / 32]`, from the low bits of a word upwards."""
    each = 32 // bits
    shifted = numbers.long().unflatten(1, (-1, each)) << (bits * torch.arange(each))
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def integers(weight: Tensor, bits: int, group: int, *, zeros: bool, scale: torch.dtype) -> tuple[Tensor, ...]:
    """Codes from 0 to 2^bits - 1, scales and zero points `[out, groups]` of a matrix, rounded to nearest."""
    parts, most = weight.unflatten(1, (-1, group)), (1 << bits) - 1
    if zeros:
        low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
        step = ((high - low) / most).to(scale)
        zero = (-low / step.float()).round().clamp(0, most).long()
    else:
        step = (parts.abs().amax(-1) / (most // 2)).to(scale)
        zero = torch.full(step.shape, 1 << (bits - 1))
    codes = ((parts / step.float()[..., None]).round().long() + zero[..., None]).clamp(0, most)
    return codes.flatten(1), step, zero


def meant(codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """(code - zero) * step in float32."""
    group = codes.shape[1] // step.shape[1]
    wide = (each.repeat_interleave(group, 1) for each in (zero, step.float()))
    return (codes - next(wide)).float() * next(wide)


def act_order(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs in an order of importance, and the group of each of them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order)) // GROUP
    return order, index


def gptq(
    name: str, weight: Tensor, *, bits: int = 4, version: int = 1, zeros: bool = False, ordered: bool = False
) -> Written:
    """AutoGPTQ's layout; version 1 stores zero points minus one."""
    order, index = (
        act_order(weight) if ordered else (torch.arange(weight.shape[1]), torch.arange(weight.shape[1]) // GROUP)
    )
    codes, step, zero = integers(weight[:, order], bits, GROUP, zeros=zeros, scale=torch.float16)
    if version == 1:
        zero = zero.clamp_min(1)  # it cannot store 0
    plain, unsorted = meant(codes, step, zero), torch.empty_like(codes)
    unsorted[:, order] = codes
    tensors = {
        f"{name}.qweight": words(unsorted, bits).t().contiguous(),
        f"{name}.qzeros": words(zero.t() - int(version == 1), bits),
        f"{name}.scales": step.t().contiguous(),
        f"{name}.g_idx": index.int(),
    }
    return tensors, torch.empty_like(plain).index_copy_(1, order, plain)


def awq(name: str, weight: Tensor) -> Written:
    """AutoAWQ's layout `gemm`."""
    codes, step, zero = integers(weight, 4, GROUP, zeros=True, scale=torch.float16)
    mixed = [0, 2, 4, 6, 1, 3, 5, 7]
    along = [each.t().unflatten(1, (-1, 8))[..., mixed].flatten(1) for each in (codes, zero)]
    tensors = {
        f"{name}.qweight": words(along[0], 4),
        f"{name}.qzeros": words(along[1], 4),
        f"{name}.scales": step.t().contiguous(),
    }
    return tensors, meant(codes, step, zero)


def packed(
    name: str, weight: Tensor, *, bits: int = 4, group: int = GROUP, zeros: bool = False, ordered: bool = False
) -> Written:
    """compressed-tensors' `pack-quantized`."""
    group = group or weight.shape[1]
    order, index = act_order(weight) if ordered else (torch.arange(weight.shape[1]), None)
    codes, step, zero = integers(weight[:, order], bits, group, zeros=zeros, scale=torch.bfloat16)
    plain, unsorted = meant(codes, step, zero), torch.empty_like(codes)
    unsorted[:, order] = codes
    tensors = {
        f"{name}.weight_packed": words(unsorted, bits),
        f"{name}.weight_scale": step,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors[f"{name}.weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    if index is not None:
        tensors[f"{name}.weight_g_idx"] = index.int()
    return tensors, torch.empty_like(plain).index_copy_(1, order, plain)


def int8(name: str, weight: Tensor, *, group: int = 0, zeros: bool = False) -> Written:
    """compressed-tensors' `int-quantized`: a scale for each output."""
    codes, step, zero = integers(weight, 8, group or weight.shape[1], zeros=zeros, scale=torch.bfloat16)
    tensors = {f"{name}.weight": (codes - 128).to(torch.int8), f"{name}.weight_scale": step}
    if zeros:
        tensors[f"{name}.weight_zero_point"] = (zero - 128).to(torch.int8)
    return tensors, meant(codes, step, zero)


def fp8(
    name: str, weight: Tensor, *, block: tuple[int, int], suffix: str, scale: torch.dtype = torch.float32
) -> Written:
    """Floats of 8 bits in blocks, of which one may be the whole matrix or a row; the last blocks may be smaller."""
    rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    out = torch.empty_like(weight)
    steps = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns), dtype=scale)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(steps.shape[0]):
        for j in range(steps.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            steps[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / steps[i, j].float()).to(torch.float8_e4m3fn)
            out[part] = codes[part].float() * steps[i, j].float()
    return {f"{name}.weight": codes, f"{name}.weight{suffix}": steps}, out


def mxfp4(name: str, weight: Tensor) -> Written:
    """gpt-oss's stacked experts: `weight` is `[experts, in, out]`."""
    parts = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (parts.abs().amax(-1) / 6).log2().ceil().clamp(-127, 120).int()
    small, levels = parts / exponent.float().exp2()[..., None], torch.tensor(_E2M1)
    index = (small.abs()[..., None] - levels).abs().argmin(-1)
    codes = index + 8 * (small < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    signed = levels[index] * torch.where(small < 0, -1.0, 1.0) * exponent.float().exp2()[..., None]
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": (exponent + 127).to(torch.uint8)}
    return tensors, signed.flatten(2).transpose(1, 2).contiguous()


def _compressed(kind: str, form: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def _with(write: Callable[..., Written], **options: Any) -> Callable[[str, Tensor], Written]:
    return lambda name, weight: write(name, weight, **options)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_GROUPS = {"group_size": GROUP}
FORMATS = {
    "ct-int8": Format(_compressed("int", "int-quantized", 8, "channel"), int8),
    "ct-int8-groups": Format(_compressed("int", "naive-quantized", 8, "group", **_GROUPS), _with(int8, group=GROUP)),
    "ct-int8-zeros": Format(
        _compressed("int", "naive-quantized", 8, "channel", symmetric=False), _with(int8, zeros=True)
    ),
    "ct-int4": Format(_compressed("int", "pack-quantized", 4, "group", **_GROUPS), packed),
    "ct-int4-rows": Format(_compressed("int", "pack-quantized", 4, "channel"), _with(packed, group=0)),
    "ct-int4-zeros": Format(
        _compressed("int", "pack-quantized", 4, "group", symmetric=False, **_GROUPS), _with(packed, zeros=True)
    ),
    "ct-int4-ordered": Format(
        _compressed("int", "pack-quantized", 4, "group", actorder="group", **_GROUPS), _with(packed, ordered=True)
    ),
    "ct-packed8": Format(_compressed("int", "pack-quantized", 8, "group", **_GROUPS), _with(packed, bits=8)),
    "ct-fp8": Format(
        _compressed("float", "float-quantized", 8, "tensor"),
        _with(fp8, block=(0, 0), suffix="_scale"),
        on_kernels=False,
    ),
    "ct-fp8-rows": Format(
        _compressed("float", "float-quantized", 8, "channel"),
        _with(fp8, block=(1, 0), suffix="_scale", scale=torch.bfloat16),
        on_kernels=False,
    ),
    "gptq": Format(_GPTQ, gptq),
    "gptq-ordered": Format(_GPTQ | {"desc_act": True, "sym": False}, _with(gptq, ordered=True, zeros=True)),
    "gptq-2": Format(
        _GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, _with(gptq, version=2, zeros=True, ordered=True)
    ),
    "gptq-8": Format(_GPTQ | {"bits": 8}, _with(gptq, bits=8)),
    "gptq-8-zeros": Format(_GPTQ | {"bits": 8, "sym": False}, _with(gptq, bits=8, zeros=True, ordered=True)),
    "awq": Format(_AWQ, awq),
    "fp8-blocks": Format(
        _FP8 | {"weight_block_size": [48, 48]}, _with(fp8, block=(48, 48), suffix="_scale_inv"), on_kernels=False
    ),
    "fp8-tensor": Format(
        _FP8 | {"activation_scheme": "static"}, _with(fp8, block=(0, 0), suffix="_scale"), on_kernels=False
    ),
}

SIZES = {
    "vocab_size": zoo.VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": zoo.END,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


def publish(folder: Path, config: PreTrainedConfig, form: Format, files: int = 1) -> PreTrainedModel:
    """Write a model in a format to a folder; returns the float model with the weights that the codes mean."""
    model = zoo.with_large_weights(copy.deepcopy(config))
    tensors: Tensors = {}
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                written, plain = form.write(name, module.weight.detach())
                tensors |= written
                module.weight.copy_(plain)
    coded = {name.rpartition(".")[0] + ".weight" for name in tensors}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors |= {key: value for key, value in model.state_dict().items() if key not in coded | tied}
    save(folder, config, form.settings, tensors, files)
    return model


def save(folder: Path, config: PreTrainedConfig, settings: dict[str, Any], tensors: Tensors, files: int = 1) -> None:
    """Write a checkpoint of one or several files."""
    folder.mkdir(exist_ok=True, parents=True)
    names, index = sorted(tensors), {}
    for i in range(files):
        file = "model.safetensors" if files == 1 else f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file({key: tensors[key].contiguous() for key in names[i::files]}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names[i::files], file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    written = config.to_dict() | {
        "quantization_config": settings, "dtype": "float32", "architectures": [type(build(config)).__name__],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written), "utf-8")


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """The model's class, without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model
