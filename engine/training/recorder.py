"""Keeps what the target computes while it writes: a proposer that drafts nothing and watches every pass.

`LogitScaling` makes the target's distributions of the next token of what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import ModelError
from engine.model.tap import FINAL, Tap
from engine.proposers.base import Passed, Proposer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RECORDER = "recorder"  # its name among proposers


class RowRecorder(Proposer):
    """Rows of hidden states by request: bfloat16 `[positions, (places + 1) * hidden]`, the last part after `FINAL`.

    The engine goes on without an observer that fails, so `take` checks that every position was seen.
    """

    def __init__(self, tap: Tap, places: Seq[int]) -> None:
        self._tap, self._places = tap, (*places, FINAL)
        self._most: dict[str, int] = {}  # positions of each request that is recorded
        self._rows: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}

    def expect(self, request_id: str, positions: int) -> None:
        """Keep the rows of this request, which feeds at most so many tokens."""
        self._most[request_id], self._seen[request_id] = positions, 0

    def observe(self, passed: Seq[Passed]) -> None:
        """Copy what was just fed; a sequence that is fed again after a preemption overwrites its rows."""
        hidden = self._tap.read(self._places)
        assert hidden is not None, "the target has not run"
        hidden = hidden.to("cpu", torch.bfloat16)
        for p in passed:
            name = p.sequence.request_id
            if name in self._most:
                self._keep(name, p.feed.start, hidden[p.rows_from(p.feed.start)])

    def _keep(self, name: str, start: int, rows: Tensor) -> None:
        if name not in self._rows:
            self._rows[name] = torch.empty(self._most[name], rows.shape[1], dtype=torch.bfloat16)
        if start > self._seen[name]:  # what came before was not seen: `take` tells
            return
        self._rows[name][start : start + len(rows)] = rows
        self._seen[name] = start + len(rows)

    def take(self, request_id: str, positions: int) -> Tensor:
        """The rows of the first `positions` positions, which are then forgotten.

        Raises:
            ModelError: the target's passes did not show all of them.
        """
        del self._most[request_id]
        rows, seen = self._rows.pop(request_id, torch.empty(0)), self._seen.pop(request_id)
        if seen < positions:
            raise ModelError(
                f"the target's hidden states were seen at {seen} of {positions} positions of a text: no head can read "
                "it (a model that runs one sequence at a time, for instance)"
            )
        return rows[:positions].clone()


# Fields by which families scale their logits, and whether they multiply.
_FACTORS = {"logit_scale": True, "lm_head_multiplier": True, "logits_scaling": False}
_CAP = "final_logit_softcapping"


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """How logits follow from x, the product of features and output matrix: x * factor, then cap * tanh(x / cap)."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitScaling:
        """As the fields of a target's config say. `Writer.check_law` tests whether nothing else changes its logits."""
        text = config.get_text_config()
        factor = 1.0
        for name, multiplies in _FACTORS.items():
            value = getattr(text, name, None)
            if value is not None:
                factor *= float(value) if multiplies else 1 / float(value)
        return cls(factor, getattr(text, _CAP, None))

    def logits(self, features: Tensor, matrix: Tensor) -> Tensor:
        """float32 `[..., vocab]` of features `[..., hidden]` and rows `[vocab, hidden]`."""
        made = F.linear(features, matrix).float() * self.factor
        return made if self.cap is None else self.cap * (made / self.cap).tanh()
