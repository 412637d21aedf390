"""Rounds a checkpoint once and saves its codes, which are bitwise equal to those of rounding at load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from pilotfish.engine.choices import Rounded
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import as_model_error, read_config
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.load import check, prepared, renamed
from pilotfish.engine.model.decoder.weights import HEAD, TABLE, WeightReader
from pilotfish.engine.model.published.files import folder_of, read_tensors
from pilotfish.engine.model.published.methods import CODES, SCALES, quantisation_of
from pilotfish.engine.model.text_part import names_in_whole
from pilotfish.engine.native.weights import GroupedCodes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# In `quantization_config`, so that software without support for the method refuses the weights.
_METHODS: dict[str, Rounded] = {f"pilotfish-{weights}": weights for weights in get_args(Rounded)}
_VERSIONS: dict[Rounded, int] = {"int8": 3, "int4": 5}
_STACKED = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt")


def quantised_as(config: PreTrainedConfig) -> Rounded | None:
    """The weight format of a checkpoint written by `save_quantised`; None for any other checkpoint.

    Raises:
        ModelError: it was written by an incompatible version.
    """
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict):
        return None
    weights = _METHODS.get(str(found.get("quant_method")))
    if weights and found != _mark(weights):
        version = found.get("version")
        raise ModelError(f"{weights} weights have version {version}; supported: {_VERSIONS[weights]} (quantize again)")
    return weights


def _mark(weights: Rounded) -> dict[str, Any]:
    return {"quant_method": f"pilotfish-{weights}", "version": _VERSIONS[weights]}


def save_quantised(name: str, revision: str | None, out: Path, weights: Rounded = "int8") -> None:
    """Round the checkpoint `name` and write it to the folder `out`.

    Raises:
        ModelError: `name` cannot be loaded, is already rounded or is not in the table of architectures, or `out` is not
        empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{str(out)!r} is not empty; expected a new folder")
    config = read_config(name, revision)
    others = quantisation_of(name, config)
    already = others.method if others else quantised_as(config)
    if already:
        raise ModelError(f"{name!r} already has {already} weights")
    with as_model_error(name):
        tensors = _rounded(name, revision, config, weights)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    source = folder_of(name, revision, *_BESIDE_WEIGHTS)
    for pattern in _BESIDE_WEIGHTS:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)
    written = json.loads((source / "config.json").read_text("utf-8")) | {"quantization_config": _mark(weights)}
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def _rounded(name: str, revision: str | None, config: PreTrainedConfig, weights: Rounded) -> dict[str, Tensor]:
    """All tensors of the checkpoint, by its own names, with codes instead of each matrix that a decoder rounds."""
    architecture, renames = architecture_for(config), (names_in_whole(config) or {}).items()
    if architecture is None:
        raise ModelError(f"{name!r} is a {config.model_type} model, which is not in the table of architectures")
    tensors = read_tensors(name, revision)
    given, codes = prepared(tensors, architecture, renames), dict[str, GroupedCodes]()
    check(name, architecture, given)
    DecoderModel(architecture, config, WeightReader(given, torch.float32, weights, codes=codes))  # rounds all
    original = renamed({path: path for path in tensors}, architecture, renames)
    written = {_path_in({HEAD: HEAD} | original, key): found for key, found in codes.items()}
    stacks = {_STACKED.sub(r"\1.\3", key) for key in codes}
    rounded = {path for key, path in original.items() if key in {TABLE, *codes, *stacks} or _first(key) in codes}
    kept = {path: tensor for path, tensor in tensors.items() if path not in rounded}
    for path, found in written.items():
        fields = {f"weight_{field}": getattr(found, field) for field in SCALES}
        kept |= {f"{path}.{kind}": x for kind, x in fields.items() if x is not None}
        kept[f"{path}.{CODES}"] = found.codes[:]
    return {key: tensor.contiguous() for key, tensor in kept.items()}


def _path_in(original: Mapping[str, str], key: str) -> str:
    """The name in the checkpoint of the matrix `key`; a part of a larger weight keeps the decoder's name."""
    path, stack = original.get(key, key), original.get(_STACKED.sub(r"\1.\3", key))
    if key not in original and stack is not None:
        path = stack.partition("layers.")[0] + key[key.index("layers.") :]
    return path.removesuffix(".weight")


def _first(key: str) -> str:
    """The first matrix of a joined weight (`weights.prepared`): `x.q|k.weight` -> `x.q.weight`."""
    if "*" in key:
        return key.removesuffix(".t").replace("*", "0") + ".weight"
    return re.sub(r"\|[^.]*", "", key)
