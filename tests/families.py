"""A saved family: its folder, a near draft beside it, ragged prompts, and what `generate` makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests import zoo

NEW_TOKENS = 20


@dataclass(frozen=True)
class Saved:
    """Two checkpoints and the oracle."""

    target: str
    draft: str
    prompts: list[list[int]]
    expected: list[list[int]]


def save(family: str, folder: Path, **how: object) -> Saved:
    """Write the family's model and a near draft of it as checkpoints."""
    model = zoo.reference(family)
    model.save_pretrained(folder / "target", **how)
    zoo.near(model).save_pretrained(folder / "draft", **how)
    prompts = zoo.prompts(4)
    return Saved(str(folder / "target"), str(folder / "draft"), prompts, [generate(model, p) for p in prompts])


def generate(model: PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """Greedy, by transformers, alone; the prompt's tokens left out."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
