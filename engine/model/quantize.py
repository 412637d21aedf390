"""A model with weights of 8 or 4 bits: rounded at load, or rounded and saved once and then loaded as saved.

This module knows modules and files. Source weights stay mapped from their files and are rounded one matrix at a time,
so that memory never holds all of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization
from transformers.pytorch_utils import Conv1D

from engine.attention.registry import ATTENTION_NAME
from engine.choices import Rounded, Weights
from engine.errors import ModelError
from engine.machine.mapped import release_mapped
from engine.model.checkpoint import read_config, told_as_model_error
from engine.model.linear import fp8, w4
from engine.model.linear.activations import make_row_wise
from engine.model.linear.int4 import GROUP, Int4Linear, fits
from engine.model.linear.int8 import Int8Linear
from engine.model.linear.packed import MATMULS, matrix
from engine.model.linear.routing import make_routing_row_wise
from engine.model.linear.swap import bytes_after_swap, is_router
from engine.model.linear.unstack import unstack
from engine.model.published.files import folder_of, read_tensors
from engine.model.published.methods import quantisation_of
from engine.model.runner import load_model, prepare

# In `quantization_config`, so that software that does not know the method refuses the weights.
_METHODS: dict[str, Rounded] = {f"pilotfish-{weights}": weights for weights in get_args(Rounded)}
_VERSIONS: dict[Rounded, int] = {"int8": 2, "int4": 4}
# A name that other software does not mistake for the name of a float weight.
_SCALE = "weight_scale"
_KINDS = {"weight_int4": Int4Linear, "weight_int8": Int8Linear}
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt")


def quantise(model: PreTrainedModel, weights: Rounded = "int8") -> None:
    """Replace every matmul of `model` by a rounded one, each expert's too. Embeddings, norms, routers and others stay.

    With int4, the head and matrices that do not consist of whole groups are in int8.

    Rounding can turn a difference in the last bit into a step of 1/127. So the operations between the matmuls must not
    depend on batch mates either.

    Raises:
        ModelError: a weight has a number that is not finite.
    """
    _round(model, weights)
    make_routing_row_wise(model)


def _round(model: PreTrainedModel, weights: Rounded) -> None:
    """Do what `quantise` does, but leave a mixture's routing as it is: modules keep the names that are saved."""
    unstack(model)
    make_row_wise(model)
    head = model.get_output_embeddings()
    # By name, one at a time: a list of modules would keep all float weights in memory until the loop ends.
    for name in [name for name, module in model.named_modules() if _is_matmul(name, module)]:
        module = cast("nn.Linear | Conv1D", model.get_submodule(name))
        # Logits must be in float32: rounded to bfloat16, many would be equal.
        dtype = torch.float32 if module is head else None
        weight = matrix(module)
        rounded = Int4Linear if weights == "int4" and module is not head and fits(weight) else Int8Linear
        made = rounded.of(weight, module.bias, dtype)
        if not made.scale.isfinite().all():
            raise ModelError(f"{name}.weight has a number that is not finite")
        model.set_submodule(name, made)
        release_mapped(weight)


def _is_matmul(name: str, module: nn.Module) -> bool:
    return type(module) in MATMULS and not is_router(name)


def weight_bytes(model: PreTrainedModel, dtype: torch.dtype, weights: Weights, *, on_cuda: bool = False) -> int:
    """Bytes of the weights of a float model in `dtype`, or rounded; the model may be on the meta device.

    Of a model that would be rounded on a CPU, stacked experts are replaced by their single matrices.
    """
    if weights in ("native", "dequantised"):
        return sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    if weights == "fp8":
        return bytes_after_swap(model, dtype, fp8.fits, fp8.num_bytes)
    if on_cuda:
        return bytes_after_swap(model, dtype, w4.fits, w4.num_bytes)
    unstack(model)
    modules = dict(model.named_modules())
    matmuls = [module for name, module in modules.items() if _is_matmul(name, module)]
    # All parameters of other modules, even shared ones: a head that shares the embedding's weights gets its own copy.
    others = {
        id(p): p for m in modules.values() if not isinstance(m, nn.Linear | Conv1D) for p in m.parameters(recurse=False)
    }
    held: int = sum(p.numel() for p in others.values()) * dtype.itemsize
    head = model.get_output_embeddings()
    in_groups = [m for m in matmuls if weights == "int4" and m is not head and fits(matrix(m))]
    # Scales: in 4 bits, 2 bytes for each group of inputs of an output; else 4 bytes for each output.
    grouped = sum(matrix(m).numel() // 2 + 2 * matrix(m).numel() // GROUP for m in in_groups)
    return held + grouped + sum(matrix(m).numel() + 4 * matrix(m).shape[0] for m in matmuls if m not in in_groups)


def quantised_as(config: PreTrainedConfig) -> Rounded | None:
    """How the weights of a checkpoint that `save_quantised` wrote are rounded; None for any other checkpoint.

    Raises:
        ModelError: another version wrote them.
    """
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict):
        return None
    weights = _METHODS.get(str(found.get("quant_method")))
    if weights and found != _mark(weights):
        version = found.get("version")
        raise ModelError(
            f"{weights} weights of version {version}; this Pilotfish reads {_VERSIONS[weights]}: quantize again"
        )
    return weights


def _mark(weights: Rounded) -> dict[str, Any]:
    return {"quant_method": f"pilotfish-{weights}", "version": _VERSIONS[weights]}


def load_quantised(name: str, revision: str | None, dtype: torch.dtype, weights: Rounded = "int8") -> PreTrainedModel:
    """Load a model with rounded weights from any checkpoint, on a CPU only.

    `dtype` is the type of its rows, embeddings and K/V. `weights` applies to a checkpoint that is not rounded yet.

    Raises:
        ModelError: there is no loadable checkpoint, or weights are missing.
    """
    config = read_config(name, revision)
    with told_as_model_error(name):
        if quantised_as(config):
            tensors: Mapping[str, Tensor] = read_tensors(name, revision)
        else:
            loaded = load_model(name, revision, "auto", torch.device("cpu"))
            unstack(loaded)
            tensors = loaded.state_dict()
            del loaded
        prepare(config)
        model = skeleton(config, dtype)
        unstack(model)
        _fill(model, tensors, name, dtype)
        del tensors  # stacked experts may be no mapped file, but memory that rounding frees
    quantise(model, weights)
    return model


class _NoStorage(TorchFunctionMode):
    """Parameters, which are made with `torch.empty`, take no memory in this mode; computed tables do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **(kwargs or {}) | on_meta)


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with our attention, whose parameters are on the meta device until it is filled."""
    with _NoStorage(), initialization.no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    model.eval()
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> None:
    """Give a skeleton its weights: rounded ones as they are, other matmuls' weights unrounded, the rest in `dtype`."""
    floats = dict(tensors)
    for key in tensors:
        path, _, kind = key.rpartition(".")
        if kind in _KINDS:
            weight, scale, bias = floats.pop(key), floats.pop(f"{path}.{_SCALE}"), floats.pop(f"{path}.bias", None)
            module = model.get_submodule(path)
            dtype_of_out = torch.float32 if module is model.get_output_embeddings() else None
            made = _KINDS[kind](weight, scale, bias, dtype_of_out)
            _check_shape(key, made, cast("nn.Linear | Conv1D", module))
            model.set_submodule(path, made)
    wanted = model.state_dict()
    missing = sorted(wanted.keys() - floats.keys())
    if missing:
        raise ModelError(f"model {name!r} lacks {len(missing)} of its weights, {missing[0]} among them")
    model.load_state_dict({key: floats[key] for key in wanted}, assign=True)
    for path, module in model.named_modules():
        if not _is_matmul(path, module):
            for parameter in module.parameters(recurse=False):
                stored, parameter.data = parameter.data, parameter.to(dtype)
                if parameter.dtype != stored.dtype:
                    release_mapped(stored)


def _check_shape(key: str, made: Int8Linear, module: nn.Linear | Conv1D) -> None:
    has, wants = [made.out_features, made.in_features], list(matrix(module).shape)
    if has != wants:
        raise ModelError(f"{key} holds a matrix of {has}; the config says {wants}")
    scales = wants[:1] if type(made) is Int8Linear else [wants[0], wants[1] // GROUP]
    dtype = torch.float32 if type(made) is Int8Linear else torch.bfloat16
    if list(made.scale.shape) != scales or made.scale.dtype != dtype:
        raise ModelError(
            f"the scales of {key} are {made.scale.dtype} {list(made.scale.shape)}; expected {dtype} {scales}"
        )


def save_quantised(name: str, revision: str | None, out: Path, weights: Rounded = "int8") -> None:
    """Round the checkpoint `name` and write it to the folder `out`; a model loaded from there is bitwise the same.

    Raises:
        ModelError: `name` cannot be loaded or is rounded already, or `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{str(out)!r} is not empty; expected a new folder")
    config = read_config(name, revision)
    others = quantisation_of(name, config)
    already = others.method if others else quantised_as(config)
    if already:
        raise ModelError(f"{name!r} has {already} weights already")
    model = load_model(name, revision, "auto", torch.device("cpu"))
    _round(model, weights)
    out.mkdir(parents=True, exist_ok=True)
    save_file(_tensors_of(model), out / "model.safetensors", metadata={"format": "pt"})
    source = folder_of(name, revision, *_BESIDE_WEIGHTS)
    for pattern in _BESIDE_WEIGHTS:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)
    written = json.loads((source / "config.json").read_text("utf-8")) | {"quantization_config": _mark(weights)}
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def _tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, Int8Linear):
            assert module.weight_int8 is not None, "packed"
            kind = "weight_int4" if isinstance(module, Int4Linear) else "weight_int8"
            tensors |= {f"{path}.{kind}": module.weight_int8, f"{path}.{_SCALE}": module.scale}
            if module.bias is not None:
                tensors[f"{path}.bias"] = module.bias
    return {key: tensor.contiguous() for key, tensor in tensors.items()}
