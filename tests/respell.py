"""Checkpoints that say the same in other tokens: ids shuffled, tokens left out, logits padded, spelled another way."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def shuffled(source: Path, folder: Path, *, without: int = 0, padding: int = 0, seed: int = 0) -> dict[int, int]:
    """Save `source` under other ids, `without` its newest merged tokens; returns {old id: new id} of those kept."""
    settings = json.loads((source / "tokenizer.json").read_text("utf-8"))
    special = {token["content"] for token in settings["added_tokens"]}
    by_id = sorted(settings["model"]["vocab"].items(), key=lambda item: item[1])
    kept = by_id[: len(by_id) - without]
    places = list(range(len(kept)))
    random.Random(seed).shuffle(places)
    new_id = {old: place for (_, old), place in zip(kept, places, strict=True)}
    settings["model"]["vocab"] = {piece: new_id[old] for piece, old in kept}
    names = set(settings["model"]["vocab"])
    settings["model"]["merges"] = [m for m in settings["model"]["merges"] if "".join(m) in names and set(m) <= names]
    for token in settings["added_tokens"]:
        token["id"] = new_id[token["id"]]
    assert special <= names
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    _renumber(model, new_id, len(kept) + padding)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    return new_id


def _renumber(model: PreTrainedModel, new_id: dict[int, int], width: int) -> None:
    """Move the rows of embedding and head (tied here) to their new places."""
    old = model.get_input_embeddings().weight.data
    fresh = torch.zeros(width, old.shape[1])
    fresh[list(new_id.values())] = old[list(new_id)]
    model.resize_token_embeddings(width, mean_resizing=False)
    model.get_input_embeddings().weight.data.copy_(fresh)
    for owner in (model.config, model.generation_config):
        for role in ("bos_token_id", "eos_token_id"):
            value = getattr(owner, role)
            setattr(owner, role, None if value is None else new_id[value])
