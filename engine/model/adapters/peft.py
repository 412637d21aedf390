"""Reads a LoRA adapter in PEFT format: a folder with its config and its matrices.

Anything but scale * B (A x) on a linear layer is refused by name: an adapter is served exactly, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from torch import Tensor

from pilotfish.engine.errors import ModelError, shown
from pilotfish.engine.model.bounded import bounded

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Config fields about the adapter's origin or training, or the places of its matrices, which the weights file also has.
_WITHOUT_MEANING = frozenset((
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
))  # fmt: skip
_READ = frozenset((
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "r", "rank_pattern",
    "target_modules", "use_rslora",
))  # fmt: skip
_REASONS = {
    "modules_to_save": "fully trained modules are not supported, only low-rank changes of linear layers",
    "use_dora": "DoRA is not supported (it also scales the base matrix)",
    "trainable_token_indices": "trained embeddings are not supported, only low-rank changes of linear layers",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "layer_replication": "repeated layers are not supported",
    "target_parameters": "parameters outside of linear layers are not supported",
    "lora_bias": "trained biases are not supported",
}
# The others modify the base model.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_OTHER_KEYS = {
    ".base_layer.": "matrices of the base model are not supported (save_embedding_layers=False omits them)",
    "lora_embedding_A": "changes of embeddings are not supported, only low-rank changes of linear layers",
    "lora_embedding_B": "changes of embeddings are not supported, only low-rank changes of linear layers",
    "lora_magnitude_vector": "DoRA is not supported (it also scales the base matrix)",
}


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """The adapter of one matmul: `b` `[out, rank]` times `a` `[rank, in]`, float32; `b` includes the scale."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as stored in its folder."""

    parts: Mapping[str, LoraMatrices]  # by the path of the matmul in the model, `model.layers.0.self_attn.q_proj`
    is_transposed: bool  # the base model stores its matrices as `[in, out]`
    fingerprint: str  # 16 hexadecimal digits, a hash of both files


def read_adapter(folder: Path) -> AdapterFile:
    """Read the adapter in `folder`.

    Raises:
        ModelError: there is none, or it uses unsupported features; the message quotes them.
    """
    config_bytes, weight_bytes = (_bytes_of(folder, name) for name in (CONFIG, WEIGHTS))
    try:
        config = json.loads(config_bytes)
        tensors = read_tensors(weight_bytes)
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ModelError(f"{str(folder)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} of {str(folder)!r} is {shown(config)}; expected an object")
    for problem in _problems(config):
        raise ModelError(problem)
    rules = _Rules(config)
    parts = dict(_parts(rules, tensors))
    if not parts:
        raise ModelError(f"{WEIGHTS} has no LoRA matrices ({len(tensors)} tensors)")
    digest = hashlib.blake2b(config_bytes + b"\0" + weight_bytes, digest_size=8).hexdigest()
    return AdapterFile(parts, bool(config.get("fan_in_fan_out")), digest)


def _bytes_of(folder: Path, name: str) -> bytes:
    try:
        return bounded(folder / name).read_bytes()
    except OSError as error:
        raise ModelError(f"{str(folder)!r} has no readable {name}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Rules:
    """The settings of a valid config for each module."""

    config: Mapping[str, Any]

    @property
    def targets(self) -> str | list[str]:
        return self.config["target_modules"]  # type: ignore[no-any-return]

    def has(self, path: str) -> bool:
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or re.fullmatch(self.targets, path) is not None
        return any(path == target or path.endswith(f".{target}") for target in self.targets)

    def rank_of(self, path: str) -> int:
        return int(self._of("r", "rank_pattern", path))

    def scale_of(self, path: str) -> float:
        """The factor of B (A x): alpha / rank, or alpha / sqrt(rank) if stabilised (Kalajdzievski 2023)."""
        rank = self.rank_of(path)
        divisor = math.sqrt(rank) if self.config.get("use_rslora") else rank
        return self._of("lora_alpha", "alpha_pattern", path) / divisor

    def _of(self, default: str, pattern: str, path: str) -> float:
        """The value of the first key of a pattern that the end of the path matches; else the default."""
        found, every = (self.config.get(pattern) or {}).items(), self.config[default]
        return float(next((value for key, value in found if re.fullmatch(rf"(.*\.)?({key})", path)), every))


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("peft_type") != "LORA":
        yield f"peft_type is {shown(config.get('peft_type'))}; supported: LORA"
    for key, value in config.items():
        if value and key not in _WITHOUT_MEANING | _READ:
            yield f"{key} is {shown(value)}; {_REASONS.get(key, 'this field is not supported')}"
    if config.get("bias", "none") != "none":
        yield f"bias is {shown(config['bias'])}; supported: none (biases cannot be changed)"
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        start = shown(config["init_lora_weights"])
        yield f"init_lora_weights is {start}; it requires a modified base model (convert the adapter first)"
    yield from _malformed(config)


def _malformed(config: Mapping[str, Any]) -> Iterator[str]:
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        yield f"r is {shown(rank)}; expected an integer of 1 or more"
    if type(alpha) not in (int, float):
        yield f"lora_alpha is {shown(alpha)}; expected a number"
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
        yield f"target_modules is {shown(targets)}; expected a list of names, a regular expression or 'all-linear'"
    for name, kinds in (("rank_pattern", (int,)), ("alpha_pattern", (int, float))):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(type(value) in kinds and value for value in pattern.values()):
            yield f"{name} is {shown(pattern)}; expected an object with a number for each name"
            return
        yield from _broken_expressions(name, pattern)
    if isinstance(targets, str):
        yield from _broken_expressions("target_modules", [targets])


def _broken_expressions(field_name: str, texts: Mapping[str, Any] | list[str]) -> Iterator[str]:
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            yield f"{field_name} has {shown(text)}, which is not a valid regular expression: {error}"


def _parts(rules: _Rules, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, LoraMatrices]]:
    for key, a in tensors.items():
        if not key.startswith(_PREFIX) or not key.endswith((_A, _B)):
            reason = next((why for part, why in _OTHER_KEYS.items() if part in key), "supported: lora_A and lora_B")
            raise ModelError(f"unexpected tensor {shown(key)}; {reason}")
        path = key.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        other = f"{_PREFIX}{path}{_B if key.endswith(_A) else _A}"
        if other not in tensors:
            raise ModelError(f"tensor {shown(key)} has no counterpart {shown(other)}")
        if key.endswith(_A):
            yield path, _checked(rules, path, a, tensors[other])
    if isinstance(rules.targets, list):
        paths = [key.removeprefix(_PREFIX).removesuffix(_A) for key in tensors if key.endswith(_A)]
        for target in rules.targets:
            if not any(path == target or path.endswith(f".{target}") for path in paths):
                raise ModelError(f"target_modules has {target!r}, but there are no matrices for it")


def _checked(rules: _Rules, path: str, a: Tensor, b: Tensor) -> LoraMatrices:
    if not rules.has(path):
        raise ModelError(f"matrices of {path!r} are not in target_modules {shown(rules.targets)}")
    rank = rules.rank_of(path)
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
        found = f"{list(a.shape)} and {list(b.shape)}"
        raise ModelError(
            f"{path} has matrices of {found}; its rank is {rank}: expected [{rank}, inputs] and [outputs, {rank}]"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ModelError(f"{path} has matrices of {a.dtype} and {b.dtype}; expected floats")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ModelError(f"{path} has NaN or infinite values")
    return LoraMatrices(a.to(torch.float32), b.to(torch.float32) * rules.scale_of(path))
