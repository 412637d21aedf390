"""The subject of measurements outside of a server: a pair of models, and prompts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.synthetic import SyntheticPair, int8_of
from engine.config import EngineConfig
from engine.startup.build import load, pick_device
from engine.text.codec import Codec
from models import corpus, embedded_draft, embedded_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Subject:
    """Settings of an engine, and prompts."""

    settings: dict[str, Any]
    prompts: Sequence[tuple[int, ...]]

    @classmethod
    def embedded(cls, count: int) -> Subject:
        """Return the pair of the repository, and starts of functions from held-out modules."""
        codec = Codec.load(str(embedded_target()))
        assert codec is not None, "the embedded target has a tokenizer"
        prompts = [tuple(codec.encode(text)) for text in corpus.held_out_prompts(count)]
        return cls({"target": str(embedded_target()), "draft": str(embedded_draft())}, prompts)

    @classmethod
    def synthetic(cls, folder: Path, target: str, draft: str, rate: float, count: int) -> Subject:
        """Return random weights of these shapes in int8 with this draft accuracy; `folder` stores the models."""
        pair = SyntheticPair.make(folder, target, draft, rate)
        settings = {"target": str(int8_of(pair.target)), "draft": str(int8_of(pair.draft)), "dtype": "bfloat16"}
        return cls(settings, pair.rule.prompts(count, 64, seed=0))

    def config(self, **settings: Any) -> EngineConfig:
        """Return the engine's configuration with these additional settings."""
        return EngineConfig.model_validate(self.settings | settings)


def load_pair(config: EngineConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return target and draft, for any number of engines over the same weights."""
    assert config.draft is not None, "a pair has a draft"
    device = pick_device(config.device)
    target, draft = (load(config, name, None, config.weights, device) for name in (config.target, config.draft))
    return target, draft
