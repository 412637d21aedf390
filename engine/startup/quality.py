"""Compares the served model with float32 of the same checkpoint, on given texts.

Both models read the same tokens: the checkpoint in float32, by transformers' own code, and the engine as configured.
Their next-token distributions are compared at every position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.quantize import quantised_as
from pilotfish.engine.model.unbatched import plain_logits, use_own_attention
from pilotfish.engine.startup.build import build_engine, pick_device
from pilotfish.engine.types import EMPTY_STATE, StateSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.engine import Engine

_ROWS = 64  # positions per block: a distribution over 262,144 tokens takes a megabyte


@dataclass(frozen=True, slots=True)
class Quality:
    """The differences between the served model and float32. Logarithms are natural: nats.

    Attributes:
        tokens: number of compared positions.
        kl: mean of sum p log(p / q), p the distribution in float32 and q the served one.
        kl_99: the 99th percentile over positions.
        same_top: share of positions with the same most likely token.
        reference_nll: mean negative log-probability of the text's next token in float32.
        served_nll: the same of the served model.
        log_probability_difference: mean absolute difference of the two log-probabilities of the text's next token.
    """

    tokens: int
    kl: float
    kl_99: float
    same_top: float
    reference_nll: float
    served_nll: float
    log_probability_difference: float

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of float32, and of the served model."""
        return math.exp(self.reference_nll), math.exp(self.served_nll)


def measure(
    config: EngineConfig,
    texts: Seq[Seq[int]],
    reference: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Quality:
    """Compare the engine of `config` with float32 of its target, or of the checkpoint `reference`.

    `texts` are token ids of separate texts, each at most `max_model_len` long. Adapters, drafts and heads
    are ignored.

    Raises:
        ModelError: a checkpoint cannot be loaded, or the target has rounded weights and there is no `reference`.
    """
    plain = reference_model(config, reference or config.target, progress)
    return compare(config, texts, lambda text: plain_logits(plain, list(text)), progress)


def compare(
    config: EngineConfig,
    texts: Seq[Seq[int]],
    wanted: Callable[[Seq[int]], Tensor],
    progress: Callable[[str], None] = lambda _: None,
) -> Quality:
    """Compare the engine of `config` with the logits `[len(text), vocab]` `wanted` of each text."""
    served = config.model_copy(
        update={"draft": (), "adapter": {}, "proposer": None, "prefix_cache": False, "max_batch_size": 1}
    )
    engine = build_engine(served, progress)
    differences = Differences()
    for number, text in enumerate(texts, 1):
        progress(f"comparing text {number} of {len(texts)}")
        with torch.inference_mode():
            differences.add(wanted(text).cpu(), _served_logits(engine, text).cpu(), text)
    return differences.result()


def reference_model(config: EngineConfig, name: str, progress: Callable[[str], None]) -> PreTrainedModel:
    """The checkpoint in float32, run by transformers' own code."""
    described = read_config(name, config.revision if name == config.target else None)
    saved = quantised_as(described)
    if saved:
        raise ModelError(f"{name!r} is saved in {saved}; pass its float checkpoint with --reference")
    progress(f"loading {name} in float32")
    revision = config.revision if name == config.target else None
    model = load_model(name, revision, torch.float32, pick_device(config.device))
    use_own_attention(model)
    return model


def _served_logits(engine: Engine, text: Seq[int]) -> Tensor:
    """The logits of all positions `[len(text), vocab]` of the only sequence in the engine."""
    pages = list(range(-(-len(text) // engine.facts.page_size)))
    state = StateSpan(EMPTY_STATE, 0, 1, len(text))
    return engine.runner.forward([Feed(list(text), 0, pages, len(text), state=state)]).float()


class Differences:
    """Sums over positions."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same, self._pairs = 0, 0
        self._reference_nll, self._served_nll, self._apart = 0.0, 0.0, 0.0

    def add(self, reference: Tensor, served: Tensor, text: Seq[int]) -> None:
        """Logits `[len(text), vocab]` of both."""
        ids = torch.tensor([*text[1:], 0])
        for first in range(0, len(text), _ROWS):
            p, q = (x[first : first + _ROWS].double().log_softmax(-1) for x in (reference, served))
            self._kl.append((p.exp() * (p - q)).sum(-1))
            self._same += int((p.argmax(-1) == q.argmax(-1)).sum())
            rows = len(p) if first + len(p) < len(text) else len(p) - 1  # the last position has no next token
            chosen = ids[first : first + rows, None]
            wanted, found = p[:rows].gather(1, chosen), q[:rows].gather(1, chosen)
            self._pairs += rows
            self._reference_nll -= float(wanted.sum())
            self._served_nll -= float(found.sum())
            self._apart += float((wanted - found).abs().sum())

    def result(self) -> Quality:
        kl = torch.cat(self._kl)
        pairs = max(1, self._pairs)
        return Quality(
            tokens=len(kl),
            kl=float(kl.mean()),
            kl_99=float(kl.quantile(0.99)),
            same_top=self._same / len(kl),
            reference_nll=self._reference_nll / pairs,
            served_nll=self._served_nll / pairs,
            log_probability_difference=self._apart / pairs,
        )
