"""The target's distribution of the next token, from its recorded features (hidden states after the final norm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
