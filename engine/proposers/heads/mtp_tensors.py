"""The tensors of the multi-token prediction layers in a target's checkpoint: what they are called and where they lie.

Families store the same parts under different names. Here each gets one name: that in a decoder of this layer alone, or
DeepSeek's for parts that no decoder has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open

from engine.errors import ModelError
from engine.model.checkpoint import shape_of
from engine.model.decoder.weights import HEAD, TABLE
from engine.model.text_part import names_in_whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")
_ONE_LAYER = "model.layers.0."
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class MTPNames:
    """How a family names the tensors of its MTP layers.

    Attributes:
        place: a regular expression for the start of a name, with `{depth}` for the number of the target's layers; one
            of its groups is called `further` and matches in tensors of the second layer and on.
        parts: what it calls the modules beside the decoder layer, with our names.
        within: what precedes the names of the decoder layer's modules.
    """

    place: str
    parts: Mapping[str, str]
    within: str = ""

    def ours(self, rest: str) -> str:
        """Our name of a tensor of the first layer; `rest` is what follows `place` in its name."""
        module, _, kind = rest.rpartition(".")
        return f"{self.parts[module]}.{kind}" if module in self.parts else _ONE_LAYER + rest.removeprefix(self.within)


# DeepSeek-V3 (section 2.2 of arXiv 2412.19437): layers after the target's last one, each with all of its parts.
_AS_DEEPSEEK = MTPNames(
    r"model\.layers\.(?:{depth}|(?P<further>\d+))\.",
    {**{part: f"model.{part}" for part in ("enorm", "hnorm", "eh_proj")}, "shared_head.norm": "model.norm",
     "embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
)  # fmt: skip
# Qwen3-Next: a model of its own, whose layers share all parts.
_AS_QWEN = MTPNames(
    r"mtp\.(?=(?:layers\.(?P<further>[1-9]\d*)\.)?)",
    {"pre_fc_norm_embedding": "model.enorm", "pre_fc_norm_hidden": "model.hnorm", "fc": "model.eh_proj",
     "norm": "model.norm"},
    within="layers.0.",
)  # fmt: skip
_BY_TYPE: Mapping[str, MTPNames] = MappingProxyType(
    {
        "deepseek_v3": _AS_DEEPSEEK,
        "glm4_moe": _AS_DEEPSEEK,
        "glm4_moe_lite": _AS_DEEPSEEK,
        "qwen3_next": _AS_QWEN,
        "qwen3_5_text": _AS_QWEN,
        "qwen3_5_moe_text": _AS_QWEN,
    }
)


@dataclass(frozen=True, slots=True)
class MTPFinder:
    """Finds tensors of MTP layers, and those of the target that they may share, by their names in a checkpoint."""

    names: MTPNames
    config: PreTrainedConfig  # of the target

    @classmethod
    def of(cls, config: PreTrainedConfig) -> MTPFinder | None:
        """For a target; None for families whose layers we do not know."""
        names = _BY_TYPE.get(config.model_type)
        return None if names is None else cls(names, config)

    def first_layer(self, tensors: Mapping[str, T]) -> tuple[dict[str, T], int]:
        """Those of the first layer by our names, and how many layers there are."""
        found, layers = dict[str, T](), set[int]()
        for name, tensor in tensors.items():
            match = self._match(name)
            if match is not None:
                layers.add(int(match["further"] or 0))
                if not match["further"]:
                    found[self.names.ours(match.string[match.end() :])] = tensor
        return found, len(layers)

    def of_target(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """The target's embedding and output matrix."""
        return {alone: tensor for name, tensor in tensors.items() if (alone := self._alone(name)) in (TABLE, HEAD)}

    def has_layers(self, names: Iterable[str]) -> bool:
        """Whether some of `names` are of MTP layers."""
        return any(self._match(name) for name in names)

    def _match(self, name: str) -> re.Match[str] | None:
        depth = shape_of(self.config, "num_hidden_layers")
        match = re.match(self.names.place.replace("{depth}", str(depth)), self._alone(name))
        # A number below `depth` is that of a layer of the target.
        is_targets = match is not None and "{depth}" in self.names.place and int(match["further"] or depth) < depth
        return None if is_targets else match

    def _alone(self, name: str) -> str:
        """The name as of a language model that is no part of another."""
        for pattern, short in (names_in_whole(self.config) or {}).items():
            name = re.sub(pattern, short, name)
        return name


def names_here(name: str, revision: str | None) -> list[str]:
    """The names of a checkpoint's tensors as far as they are known on this machine; nothing is downloaded."""
    index = _here(name, revision, _INDEX)
    if index is not None:
        return list(_map_of(index))
    whole = _here(name, revision, _WHOLE)
    if whole is None:
        return []
    with safe_open(whole, "pt") as file:
        return list(file.keys())


def _here(name: str, revision: str | None, file: str) -> Path | None:
    if Path(name).is_dir():
        return found if (found := Path(name, file)).is_file() else None
    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def _map_of(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        found: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    return found
