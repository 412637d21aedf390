"""Tensors of a checkpoint's safetensors files, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.checkpoint import as_model_error, check_weights, check_whole

_FILES = "*.safetensors"
# Types by name in safetensors headers.
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_tensors(name: str, revision: str | None) -> dict[str, Tensor]:
    """Map every tensor of a checkpoint from its files. Raises ModelError if files are missing or truncated."""
    check_weights(name)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder_of(name, revision, _FILES).glob(_FILES)):
        check_whole(path)
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


def read_headers(name: str, revision: str | None) -> dict[str, Tensor]:
    """The types and shapes of a checkpoint's tensors, as meta tensors; nothing is downloaded.

    Raises:
        ModelError: there are no safetensors, or a header is invalid or has an unknown type.
    """
    check_weights(name)
    with as_model_error(name):
        return {
            key: torch.empty(shape, dtype=_type(key, kind), device="meta")
            for key, kind, shape in tensor_infos(name, revision)
        }


def _type(key: str, kind: str) -> torch.dtype:
    found = _TYPES.get(kind)
    if found is None:
        raise ModelError(f"{key} has type {kind}; supported: {', '.join(_TYPES)}")
    return found


def tensor_infos(name: str, revision: str | None) -> Iterator[tuple[str, str, list[int]]]:
    """Names, header types and shapes, from local files or else from the hub."""
    config = find_file(name, "config.json", revision)
    paths = [] if config is None else sorted(config.parent.glob(_FILES))
    for path in paths:
        check_whole(path)
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(key)
                yield key, part.get_dtype(), part.get_shape()
    if not paths and not Path(name).is_dir():
        from huggingface_hub import get_safetensors_metadata

        for found in get_safetensors_metadata(name, revision=revision).files_metadata.values():
            yield from ((key, info.dtype, info.shape) for key, info in found.tensors.items())


def folder_of(name: str, revision: str | None, *patterns: str) -> Path:
    """The folder of a checkpoint, to which files of the hub that match `patterns` are downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))
