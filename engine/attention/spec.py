"""What a layer's attention means, beside its queries, keys and values. Knows no batch and no arena."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """softmax(softcap(q k^T * scale) + causal mask, with a sink in its denominator) v."""

    scale: float
    window: int | None = None  # a token sees the `window` newest positions, its own included
    chunk: int | None = None  # positions are cut into chunks of this length; a token sees those of its own chunk
    softcap: float | None = None  # scores become tanh(score / softcap) * softcap
    sinks: Tensor | None = None  # [heads], one more score for each query head, which has no value

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Window and chunk: layers with the same reach see the same keys, and share masks and plans."""
        return self.window, self.chunk

    def oldest(self, position: int) -> int:
        """The first key that the token at `position` sees."""
        in_window = 0 if self.window is None else position - self.window + 1
        in_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, in_window, in_chunk)
