"""Loads the checkpoint of a head: a local folder or a hub id, safetensors only, every tensor accounted for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.errors import ModelError
from engine.model.bounded import bounded
from engine.model.decoder.shapes import Shapes

_FILES = ("*.json", "*.safetensors")
PICKLES = ("*.pt", "*.bin", "*.pth", "*.pkl")


def load_checkpoint(name: str, revision: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and all tensors of a folder or hub id.

    Raises:
        ModelError: nothing is there, or only pickled weights, which could run code of their author's.
    """
    folder = Path(name) if Path(name).is_dir() else download(name, revision)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(path for pattern in PICKLES for path in folder.glob(pattern))
        why = "it has pickled weights, which are refused: convert them (safetensors.torch.save_file)" if pickled else ""
        raise ModelError(f"{name!r} has no safetensors; {why or 'expected config.json and *.safetensors'}")
    try:
        config = json.loads(bounded(folder / "config.json").read_text("utf-8"))
        tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ModelError(f"cannot load {name!r}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name!r}: config.json holds no object")
    return config, tensors


def download(name: str, revision: str | None, patterns: Seq[str] = _FILES) -> Path:
    """The folder with those files of a hub id that match `patterns`; ModelError where there is no such id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # Names of pickles only tell what to say; their content is never fetched.
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot load {name!r}: no such folder, and the hub says {error!r}") from error


def fill(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Put `tensors` into `module`, each into its place.

    Raises:
        ModelError: what is missing, left over or of another shape.
    """
    check_fits({key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}, tensors, name)
    module.load_state_dict(dict(tensors))


def check_fits(wanted: Shapes, tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse `tensors` that are not of all the shapes that are wanted, and of no others.

    Raises:
        ModelError: what is missing, left over or of another shape.
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    problems = [f"{key} is missing" for key in sorted(wanted.keys() - found.keys())]
    problems += [f"{key} is not known" for key in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{key} is {found[key]}, expected {shape}"
        for key, shape in sorted(wanted.items())
        if found.get(key, shape) != shape
    ]
    if problems:
        rest = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(f"{name!r} does not fit the target: {'; '.join(problems[:4])}{rest}")


def number(config: Mapping[str, Any], key: str, name: str) -> int:
    """A positive number of a config; ModelError where it is missing."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{name!r}: config.json has {key} {value!r}; expected a positive number")
    return value


def target_ids(offsets: Tensor, size: int, vocab: int) -> Tensor | None:
    """The target's ids of a head's `size` tokens, int64 `[size]`: token i stands for i + `offsets[i]` (`d2t`).

    None where that is no map from so many tokens to as many of the target's `vocab`.
    """
    ids = torch.arange(len(offsets)) + offsets.long().cpu()
    is_map = tuple(offsets.shape) == (size,) and bool(((ids >= 0) & (ids < vocab)).all())
    return ids if is_map and len(ids.unique()) == size else None


def widened(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Logits `[R, size]` of a head's tokens as those of the target's, `[R, vocab]`; -inf where there is none."""
    wide = logits.new_full((len(logits), vocab), float("-inf"))
    return wide.index_copy_(1, ids, logits)


def matrix_shapes(name: str, outputs: int, inputs: int, *, has_bias: bool) -> Shapes:
    """The shapes of a matrix and its bias."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if has_bias else {})
