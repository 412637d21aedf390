"""Loads a model of the table (`architecture.py`) from any checkpoint into a decoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast, get_args

import torch
from torch import Tensor

from pilotfish.engine.choices import Rounded, Weights
from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.mapped import release_freed
from pilotfish.engine.model.checkpoint import as_model_error, end_tokens_of, read_end_tokens
from pilotfish.engine.model.decoder.architecture import Architecture
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.shapes import Shapes, shapes_of
from pilotfish.engine.model.decoder.share import Share, ShareOfWeights, share_of, sum_results
from pilotfish.engine.model.decoder.weights import CPU, HEAD, SINGLE, TABLE, WeightReader, converted_by
from pilotfish.engine.model.published.methods import read_weights
from pilotfish.engine.model.text_part import names_in_whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pilotfish.engine.model.published.base import Codes
    from pilotfish.engine.model.published.methods import Quantisation

_Weight = TypeVar("_Weight")


def load_decoder(
    name: str,
    revision: str | None,
    config: PreTrainedConfig,
    architecture: Architecture,
    dtype: torch.dtype,
    weights: Weights = "native",
    quantisation: Quantisation | None = None,
    *,
    keeps_codes: bool = True,
    device: torch.device = CPU,
    packs: bool = True,
    share: Share | None = None,
) -> DecoderModel:
    """Load the checkpoint `name`, which `config` describes.

    Args:
        name: a folder, a GGUF file, or their name on the hub.
        revision: of the hub.
        config: of the checkpoint.
        architecture: of the config.
        dtype: of everything that is neither rounded nor quantised.
        weights: format of float matrices.
        quantisation: format of a quantised checkpoint; None for floats.
        keeps_codes: keep its codes for our kernels; else they are dequantised.
        device: of the model.
        packs: whether our C multiplies floats on a CPU.
        share: the shard, if the model is sharded.

    Raises:
        ModelError: weights cannot be read, are missing, or have another shape or an unsupported type.
    """
    converted = converted_by(weights, on_cuda=device.type == "cuda")
    if converted is not None and dtype not in converted.types:
        raise ModelError(f"{weights} weights require bfloat16; dtype is {str(dtype).removeprefix('torch.')}")
    rounded = cast("Rounded", weights) if weights in get_args(Rounded) and converted is None else None
    names = (names_in_whole(config) or {}).items()
    with as_model_error(name):
        found = prepared(read_weights(name, revision, quantisation), architecture, names)
        check(name, architecture, found)
        if share is not None:
            found, architecture = ShareOfWeights(found, architecture, share), share_of(architecture, share.size)
        reader = WeightReader(
            found, dtype, rounded, keeps_codes=keeps_codes, device=device, packs=packs, converted=converted
        )
        made = DecoderModel(architecture, config, reader)
    if share is not None:
        sum_results(made, share)
    release_freed()  # of temporary codes
    ends = end_tokens_of(config, read_end_tokens(name, revision))
    config.eos_token_id = sorted(ends) or None
    return made.eval()


def renamed(
    weights: Mapping[str, _Weight], architecture: Architecture, names: Iterable[tuple[str, str]] = ()
) -> dict[str, _Weight]:
    """Weights of a checkpoint by the decoder's names; `names` as in `prepared`."""
    if TABLE.removeprefix("model.") in weights:  # the checkpoint of a model without an output matrix
        weights = {key if key == HEAD else f"model.{key}": weight for key, weight in weights.items()}
    for pattern, becomes in (*names, *architecture.names):
        weights = {re.sub(pattern, becomes, key): weight for key, weight in weights.items()}
    return dict(weights)


def prepared(
    weights: Mapping[str, Tensor | Codes], architecture: Architecture, names: Iterable[tuple[str, str]] = ()
) -> Mapping[str, Tensor | Codes]:
    """Weights by the names of a decoder, matrices as `[outputs, inputs]`.

    `names`: regular expressions for names in the checkpoint with replacements, applied before those of the
    architecture.
    """
    weights = _with_whole_convolutions(_apart(renamed(weights, architecture, names), architecture))
    if not architecture.transposed:
        return weights
    return {key: _as_outputs(weight) if key.startswith("model.layers.") else weight for key, weight in weights.items()}


def _apart(weights: Mapping[str, Tensor | Codes], architecture: Architecture) -> Mapping[str, Tensor | Codes]:
    """Split a weight named `a|b` into its parts: the rows of b follow those of a.

    `experts.*.a` contains all experts; in `experts.*.a.t` each is `[inputs, outputs]`.
    """
    joined = [key for key in weights if "|" in key or "*" in key]
    shapes, parts = shapes_of(architecture) if joined else {}, dict[str, Tensor]()
    for key in joined:
        weight, (path, _, kind) = weights[key], key.rpartition(".")
        floats = weight if isinstance(weight, Tensor) else weight.dequantised()
        if "*" in key:
            place, _, name = key.removesuffix(".t").partition(".*.")
            each = floats.chunk(shapes[f"{place}.down_proj"][0])
            turned = (part.t() if kind == "t" else part for part in each)
            parts |= {f"{place}.{number}.{name}.weight": part for number, part in enumerate(turned)}
        else:
            path, _, several = path.rpartition(".")
            names = [f"{path}.{name}.{kind}" for name in several.split("|")]
            parts |= zip(names, floats.split([shapes[name][0] for name in names]), strict=True)
    return {**weights, **parts} if joined else weights


def _with_whole_convolutions(weights: Mapping[str, Tensor | Codes]) -> Mapping[str, Tensor | Codes]:
    """Join the separate convolutions of queries, keys and values."""
    made, apart = dict(weights), "{}_conv1d.weight"
    for key, weight in weights.items():
        if key.endswith(apart.format("q")) and isinstance(weight, Tensor):
            path = key.removesuffix(apart.format("q"))
            parts = [cast("Tensor", weights[path + apart.format(kind)]) for kind in "qkv"]
            made[f"{path}conv1d.weight"] = torch.cat(parts)
    return made


def _as_outputs(weight: Tensor | Codes) -> Tensor | Codes:
    """Transpose `[inputs, outputs]` to `[outputs, inputs]`; codes already have this form."""
    return weight.t() if isinstance(weight, Tensor) and weight.ndim == 2 else weight


def check(
    name: str, architecture: Architecture, weights: Mapping[str, Tensor | Codes], more: Shapes | None = None
) -> None:
    """Refuse missing weights, and shapes that differ from the config; `more`: shapes besides the decoder's.

    Raises:
        ModelError: contains the checkpoint and the first such weight.
    """
    wanted = shapes_of(architecture) | (more or {})
    if architecture.is_tied and HEAD in weights:
        wanted[HEAD] = wanted[TABLE]
        if TABLE not in weights:
            del wanted[TABLE]
    held = {key: tuple(weight.shape) for key, weight in weights.items()}
    is_transposed = any(getattr(layer.feed, "transposed", False) for layer in architecture.layers)
    for key, (count, *sizes) in _fused_shapes(held).items():
        held[key] = count, *(reversed(sizes) if is_transposed else sizes)
    missing = sorted(wanted.keys() - held.keys())
    if missing:
        raise ModelError(f"model {name!r} is missing {len(missing)} weights, including {missing[0]}")
    for key, shape in wanted.items():
        if held[key] != shape:
            has = list(held[key])
            raise ModelError(f"model {name!r}: {key} has shape {has}; expected {list(shape)} from its config")


def _fused_shapes(shapes: Shapes) -> Shapes:
    """The shapes of fused matrices of experts, for a checkpoint with separate ones."""
    several: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        found = SINGLE.fullmatch(key)
        if found is not None:
            several.setdefault((found[1], found[3]), {})[int(found[2])] = shape
    stacks: Shapes = {}
    for (path, part), each in several.items():
        if len(set(each.values())) == 1 and each.keys() == set(range(len(each))):
            stacks[f"{path}.{part}"] = len(each), *each[0]
    for up in [key for key in stacks if key.endswith(".up_proj")]:
        gate, (count, outputs, inputs) = stacks.get(up.replace(".up_proj", ".gate_proj")), stacks[up]
        if gate in (None, stacks[up]):
            both = outputs if gate is None else 2 * outputs
            stacks[up.replace(".up_proj", ".gate_up_proj")] = count, both, inputs
    return stacks
