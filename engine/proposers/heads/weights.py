"""Loads the checkpoint of a head: a local folder or a hub id, safetensors only, without unexpected tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.bounded import bounded
from pilotfish.engine.model.checkpoint import as_model_error
from pilotfish.engine.model.decoder.shapes import Shapes
from pilotfish.engine.model.published.files import folder_of, read_tensors

PICKLES = ("*.pt", "*.bin", "*.pth", "*.pkl")  # only names are used, for the error; never downloaded
KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"


def load_checkpoint(name: str, revision: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and all tensors of a folder or hub id.

    Raises:
        ModelError: there is no checkpoint, or only pickled weights, which could run code.
    """
    with as_model_error(name):
        folder = folder_of(name, revision, "*.json", "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            pickled = any(path for pattern in PICKLES for path in folder.glob(pattern))
            convert = "pickled weights are refused; convert them (safetensors.torch.save_file)"
            why = convert if pickled else "expected config.json and *.safetensors"
            raise ModelError(f"{name!r} has no safetensors; {why}")
        config = json.loads(bounded(folder / "config.json").read_text("utf-8"))
        if not isinstance(config, dict):
            raise ModelError(f"{name!r}: config.json is not an object")
        return config, read_tensors(str(folder), None)


def flattened(config: Mapping[str, Any], name: str, kind: str) -> dict[str, Any]:
    """Flatten a config of vLLM's `speculators` library; other forms are unchanged.

    There the fields of the head, of this `kind`, are beside `transformer_layer_config`, the config of its layers.

    Raises:
        ModelError: it is of another kind, or has no config of its layers.
    """
    if KIND not in config:
        return dict(config)
    if config[KIND] != kind:
        raise ModelError(f"{name!r}: {KIND} is {config[KIND]!r}; expected {kind!r}")
    layer = config.get(_LAYER)
    if not isinstance(layer, Mapping) or "model_type" not in layer:
        raise ModelError(f"{name!r}: {_LAYER} has no model_type")
    own = {key: value for key, value in config.items() if key not in (_LAYER, "model_type")}
    return {**layer, **own}


def check_fits(wanted: Shapes, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise ModelError unless `tensors` have exactly the wanted names and shapes.

    Raises:
        ModelError: lists missing and unexpected tensors and other shapes.
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    problems = [f"{key} is missing" for key in sorted(wanted.keys() - found.keys())]
    problems += [f"{key} is unexpected" for key in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{key} is {found[key]}, expected {shape}"
        for key, shape in sorted(wanted.items())
        if found.get(key, shape) != shape
    ]
    if problems:
        rest = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(f"{name!r} does not fit the target: {'; '.join(problems[:4])}{rest}")


def drafted_ids(tensors: dict[str, Tensor], name: str, vocab: int) -> Tensor | None:
    """The target's ids of a head's tokens, int64 `[n]`; None if they are equal to the target's `vocab`.

    Row i of its output matrix is token i + `d2t[i]`, from `tensors`.

    Raises:
        ModelError: `d2t` is not an injective map to the target's tokens.
    """
    offsets, size = tensors.pop("d2t", None), len(tensors.get("lm_head.weight", range(vocab)))
    if offsets is None:
        if size != vocab:
            raise ModelError(f"{name!r} drafts {size} of the target's {vocab} tokens, but has no d2t")
        return None
    ids = torch.arange(len(offsets)) + offsets.long().cpu()
    is_map = tuple(ids.shape) == (size,) and bool(((ids >= 0) & (ids < vocab)).all())
    if not is_map or len(ids.unique()) != size:
        raise ModelError(f"{name!r}: d2t is not a map from the head's {size} tokens to the target's {vocab}")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def matrix_shapes(name: str, outputs: int, inputs: int, *, has_bias: bool) -> Shapes:
    """The shapes of a matrix and its bias."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if has_bias else {})
