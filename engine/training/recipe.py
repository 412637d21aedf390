"""The settings of a run, written once: what the target writes, and the schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """What the target writes. A text is a prompt and the target's continuation."""

    texts: int = 4096
    tokens: int = 128  # of each continuation
    prompt_tokens: int = 384  # most tokens of a prompt that are kept: its last ones
    greedy: float = 0.75  # share of the texts that continue greedily; the rest is drawn at `temperature`
    temperature: float = 1.0
    held_out: int = 32  # prompts that are never trained on, whose greedy continuations measure acceptance
    held_out_tokens: int = 64
    together: int = 64  # texts that are written at a time, and kept in one file
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a head is trained. The learning rates warm up, hold, and fall to zero over the last 60 % of the steps."""

    steps: int = 4000
    batch_tokens: int = 2048
    window: int = 320  # positions of a training sequence
    unroll: int = 4  # drafts in a row that training simulates ("training-time test")
    early_unroll: int = 1  # of the first steps, which learn more from more text than from deeper drafts
    early: float = 0.65  # share of the steps that do so
    decay: float = 0.9  # weight of each deeper draft: it is used only if all drafts before it were right
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 1e-3  # AdamW: output matrix and norms
    warmup: int = 50
    seed: int = 0

    def unroll_at(self, step: int) -> int:
        return min(self.unroll, self.early_unroll) if step < self.early * self.steps else self.unroll

    def rate_at(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.6 * self.steps))
