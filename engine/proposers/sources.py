"""Recognises the kinds of the entries of the option `draft`, from small files of a checkpoint. Loads no weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.adapters.peft import CONFIG as ADAPTER_CONFIG
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.checkpoint import as_model_error, refuse_missing_folder
from pilotfish.engine.model.gguf.container import gguf_file
from pilotfish.engine.model.published.files import tensor_infos
from pilotfish.engine.proposers.heads.uno import INNER
from pilotfish.engine.proposers.heads.weights import KIND

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from pilotfish.engine.config import EngineConfig

# Proposers of entries, in the order of `auto`, each with a description of its entry.
KINDS = {
    "model": "draft models", "self": "first layers of the target", "medusa": "Medusa heads", "eagle": "EAGLE heads",
    "dflash": "DFlash drafts", "uno": "Uno adapters", "mtp": "MTP layers of the target",
}  # fmt: skip
_SELF = re.compile(r"self(?::(?P<layers>[0-9]+))?")
_NEVER_SHARDED = {"self": "draws from whole layers", "uno": "is an adapter, and adapters cannot be sharded"}
_EAGLE_TENSORS = ("d2t", "fc.weight", "fusion_fc.weight")  # EAGLE's authors keep the config of a Llama
_MOST_LISTED = 5  # files of a folder that cannot draft


@dataclass(frozen=True, slots=True)
class DraftSource:
    """An entry of the option `draft`, and the proposer that it is for."""

    kind: str  # of `KINDS`
    entry: str  # as given
    name: str  # local folder or file, or hub id
    revision: str | None = None
    layers: int | None = None  # for self: number of the target's first layers; None is a third of them


def draft_sources(config: EngineConfig) -> dict[str, DraftSource]:
    """All entries by the name of their proposer, in the order of `KINDS`.

    Raises:
        ModelError: an entry cannot draft, two are of one kind, or one cannot draft for a target in shards.
    """
    found = dict[str, DraftSource]()
    for entry in config.draft:
        source = recognise(entry)
        other = found.setdefault(source.kind, source)
        if other is not source:
            raise ModelError(
                f"draft: {other.entry!r} and {entry!r} are both {KINDS[source.kind]}; expected at most one"
            )
        if config.tensor_parallel_size > 1 and source.kind in _NEVER_SHARDED:
            raise ModelError(
                f"tensor_parallel_size is {config.tensor_parallel_size}; draft {entry!r} {_NEVER_SHARDED[source.kind]}"
            )
    return {kind: found[kind] for kind in KINDS if kind in found}


def recognise(entry: str) -> DraftSource:
    """What an entry is: `mtp`, `self`, `self:N`, or a folder, GGUF file or hub id, optionally with `@REVISION`.

    Raises:
        ModelError: it cannot draft; the message names it and what was found.
    """
    if own := _SELF.fullmatch(entry):
        return DraftSource("self", entry, entry, layers=int(own["layers"]) if own["layers"] else None)
    if entry == "mtp":
        return DraftSource("mtp", entry, entry)
    name, _, revision = entry.rpartition("@")
    if not name or Path(entry).exists():
        name, revision = entry, ""
    return DraftSource(_kind(entry, name, revision or None), entry, name, revision or None)


def _kind(entry: str, name: str, revision: str | None) -> str:
    """The kind of a checkpoint. An adapter may be in a folder of its base model (`INNER`)."""
    if gguf_file(name, revision) is not None:
        return "model"
    refuse_missing_folder(name)
    if any(find_file(name, file, revision) for file in (ADAPTER_CONFIG, f"{INNER}/{ADAPTER_CONFIG}")):
        return "uno"
    path = find_file(name, "config.json", revision)
    if path is None:
        found = "on the hub, or the hub cannot be reached"
        if Path(name).is_dir():
            listed = sorted(file.name for file in Path(name).iterdir())[:_MOST_LISTED]
            found = f"in the folder, which has {', '.join(listed) or 'no files'}"
        raise ModelError(f"draft {entry!r} is not a GGUF file and has neither config.json nor {ADAPTER_CONFIG} {found}")
    with as_model_error(name):
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ModelError(f"draft {entry!r}: config.json is not an object")
        return _kind_of_config(entry, config) or _kind_of_tensors(name, revision)


def _kind_of_config(entry: str, config: dict[str, Any]) -> str | None:
    """The kind that a config names; None for the config of a model, which some EAGLE heads have, too."""
    classes = " ".join(map(str, (config.get(KIND, ""), *(config.get("architectures") or ())))).lower()
    if "medusa_num_heads" in config:
        return "medusa"
    for kind in ("dflash", "eagle"):
        if kind in classes or f"{kind}_config" in config:
            return kind
    if KIND in config or not {"model_type", "architectures"} & config.keys():
        found = f"{KIND} {config[KIND]!r}" if KIND in config else f"the keys {', '.join(sorted(config)[:_MOST_LISTED])}"
        raise ModelError(f"draft {entry!r} is not supported: config.json has {found}, neither a model nor a known head")
    return None


def _kind_of_tensors(name: str, revision: str | None) -> str:
    keys = [key for key, _, _ in tensor_infos(name, revision)]
    is_head = any(key in _EAGLE_TENSORS or key.endswith("hidden_norm.weight") for key in keys)
    return "eagle" if is_head else "model"
