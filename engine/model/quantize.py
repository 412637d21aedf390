"""A model with weights of 8 or 4 bits: rounded at load, or rounded and saved once and then loaded as saved.

This module knows modules and files. Source weights stay mapped from their files and are rounded one matrix at a time,
so that memory never holds all of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.attention.registry import ATTENTION_NAME
from engine.choices import Rounded, Weights
from engine.errors import ModelError
from engine.machine.mapped import release_mapped
from engine.model.checkpoint import read_config, told_as_model_error
from engine.model.linear import fp8, w4
from engine.model.linear.activations import make_row_wise
from engine.model.linear.embedding import CodedEmbedding
from engine.model.linear.grouped import GroupedCodes, GroupedLinear
from engine.model.linear.packed import is_matmul, matrix
from engine.model.linear.rounding import bits_of, round_weight, rounded_bytes
from engine.model.linear.routing import make_routing_row_wise
from engine.model.linear.swap import bytes_after_swap, is_router
from engine.model.linear.unstack import unstack
from engine.model.published.files import folder_of, read_tensors
from engine.model.published.methods import quantisation_of
from engine.model.published.saved import CODES, SCALES, SavedCodes, with_saved_codes
from engine.model.runner import load_model, prepare

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# In `quantization_config`, so that software that does not know the method refuses the weights.
_METHODS: dict[str, Rounded] = {f"pilotfish-{weights}": weights for weights in get_args(Rounded)}
_VERSIONS: dict[Rounded, int] = {"int8": 3, "int4": 5}
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt")


def quantise(model: PreTrainedModel, weights: Rounded = "int8", dtype: torch.dtype | None = None) -> None:
    """Replace every matmul of `model` by one of codes, each expert's too, and the table of embeddings likewise.

    Norms, routers and others stay. `dtype` is the type of the rows, by default that of the model. The operations
    between the matmuls must not depend on batch mates either, because rounding makes a step of a difference in the
    last bit.

    Raises:
        ModelError: a weight has a number that is not finite.
    """
    _round(model, weights, dtype or model.dtype)
    make_routing_row_wise(model)


def _round(model: PreTrainedModel, weights: Rounded, dtype: torch.dtype) -> None:
    """Do what `quantise` does, but leave a mixture's routing as it is: modules keep the names that are saved."""
    unstack(model)
    make_row_wise(model)
    head = model.get_output_embeddings()
    # By name, one at a time: a list of modules would keep all float weights in memory until the loop ends.
    for name in [name for name, module in model.named_modules() if _is_matmul(name, module)]:
        module = cast("nn.Linear", model.get_submodule(name))
        # Logits must be in float32: rounded to bfloat16, many would be equal.
        dtype_of_out = torch.float32 if module is head else None
        weight = matrix(module)
        codes = round_weight(weight, bits_of(weights, name, weight, is_head=module is head), module.bias)
        if not codes.scale.isfinite().all():
            raise ModelError(f"{name}.weight has a number that is not finite")
        model.set_submodule(name, GroupedLinear(codes, dtype_of_out))
        if module is head:
            _round_table(model, weight, codes, weights, dtype)
        release_mapped(weight)


def _round_table(
    model: PreTrainedModel, head: Tensor, codes: GroupedCodes, weights: Rounded, dtype: torch.dtype
) -> None:
    """Replace the table of embeddings by codes: those of the head where the two share their weights."""
    table = model.get_input_embeddings()
    if isinstance(table, nn.Embedding):
        is_shared = table.weight.data_ptr() == head.data_ptr() and table.weight.shape == head.shape
        bits = bits_of(weights, "", table.weight)
        found = replace(codes, bias=None) if is_shared else round_weight(table.weight, bits)
        model.set_input_embeddings(CodedEmbedding.of(found, table, dtype))


def _is_matmul(name: str, module: nn.Module) -> bool:
    return is_matmul(module) and not is_router(name)


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
    matmuls = {name: module for name, module in modules.items() if _is_matmul(name, module)}
    # All other parameters, even shared ones: a head that shares the embedding's weights gets its own copy.
    others = {
        id(parameter): parameter
        for name, module in modules.items()
        for kind, parameter in module.named_parameters(recurse=False)
        if name not in matmuls or kind == "bias"
    }
    rounded = cast("Rounded", weights)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    held: int = sum(p.numel() for p in others.values()) * dtype.itemsize
    if isinstance(table, nn.Embedding):
        is_shared = isinstance(head, nn.Linear) and head.weight is table.weight
        bits = bits_of(rounded, "", table.weight, is_head=is_shared)
        held += rounded_bytes(table.weight, bits) - table.weight.numel() * dtype.itemsize
    return held + sum(
        rounded_bytes(matrix(m), bits_of(rounded, name, matrix(m), is_head=m is head)) for name, m in matmuls.items()
    )


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
    config = read_config(name, revision, of_transformers=True)
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
    quantise(model, weights, dtype)
    return model


class _NoStorage(TorchFunctionMode):
    """Parameters, which are made with `torch.empty`, take no memory in this mode; computed tables do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **(kwargs or {}) | on_meta)


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with our attention, whose parameters are on the meta device until it is filled."""
    from transformers import AutoModelForCausalLM, initialization

    with _NoStorage(), initialization.no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    model.eval()
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> None:
    """Give a skeleton its weights: codes as they are, other matmuls' weights unrounded, the rest in `dtype`."""
    weights = with_saved_codes(tensors)
    floats = {key: weight for key, weight in weights.items() if isinstance(weight, Tensor)}
    for key, saved in weights.items():
        if isinstance(saved, SavedCodes):
            path = key.removesuffix(".weight")
            wants = matrix(cast("nn.Linear", model.get_submodule(path))).shape
            if saved.shape != tuple(wants):
                at = f"{path}.{CODES}"
                raise ModelError(f"{at} holds a matrix of {list(saved.shape)}; the config says {list(wants)}")
            _put_codes(model, path, replace(saved.codes, bias=floats.pop(f"{path}.bias", None)), dtype)
    _share_table(model, floats, dtype)
    table = model.get_input_embeddings()
    wanted = {key for key in model.state_dict() if not isinstance(_module_of(model, key), CodedEmbedding)}
    missing = sorted(wanted - floats.keys())
    if missing:
        raise ModelError(f"model {name!r} lacks {len(missing)} of its weights, {missing[0]} among them")
    model.load_state_dict({key: floats[key] for key in wanted}, assign=True, strict=False)
    for path, module in model.named_modules():
        if not _is_matmul(path, module) and module is not table:  # the table is rounded as it is stored
            for parameter in module.parameters(recurse=False):
                stored, parameter.data = parameter.data, parameter.to(dtype)
                if parameter.dtype != stored.dtype:
                    release_mapped(stored)


def _module_of(model: PreTrainedModel, key: str) -> nn.Module:
    return model.get_submodule(key.rpartition(".")[0])


def _put_codes(model: PreTrainedModel, path: str, codes: GroupedCodes, dtype: torch.dtype) -> None:
    """Put a matrix of codes, or a table, into the place of the module at `path`."""
    module = model.get_submodule(path)
    if isinstance(module, nn.Embedding):
        model.set_submodule(path, CodedEmbedding.of(codes, module, dtype))
        return
    is_head = module is model.get_output_embeddings()
    model.set_submodule(path, GroupedLinear(codes, torch.float32 if is_head else None))


def _share_table(model: PreTrainedModel, floats: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Give a table that is not stored the codes of the head, with which it shares its weights."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is table]
    if isinstance(head, GroupedLinear) and isinstance(table, nn.Embedding) and f"{names[0]}.weight" not in floats:
        model.set_input_embeddings(CodedEmbedding.of(replace(head.codes, bias=None), table, dtype))


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
    _round(model, weights, model.dtype)
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
    tensors, head = dict(model.state_dict()), cast("GroupedLinear", model.get_output_embeddings())
    for path, module in model.named_modules():
        is_table = isinstance(module, CodedEmbedding)
        if is_table:
            del tensors[f"{path}.weight"]  # holds nothing
        if isinstance(module, GroupedLinear) or (is_table and module.codes.codes is not head.codes.codes):
            codes = module.codes
            fields = {name: getattr(codes, name) for name in SCALES}
            tensors[f"{path}.{CODES}"] = codes.codes[:]
            tensors |= {f"{path}.weight_{name}": x for name, x in fields.items() if x is not None}
            if codes.bias is not None:
                tensors[f"{path}.bias"] = codes.bias
    return {key: tensor.contiguous() for key, tensor in tensors.items()}
