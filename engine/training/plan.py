"""What a run generates, and how it trains: the settings and their defaults. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """The texts to generate. A text is a prompt and the target's continuation."""

    texts: int = 4096
    tokens: int = 128  # of each continuation
    prompt_tokens: int = 384  # maximum tokens of a prompt; the last ones are kept
    greedy: float = 0.75  # share of greedy texts; the rest is sampled at `temperature`
    temperature: float = 1.0
    held_out: int = 32  # prompts whose greedy continuations measure acceptance, never trained on
    held_out_tokens: int = 64
    together: int = 64  # texts per file, generated concurrently
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The training schedule. Learning rates warm up, stay constant, and fall to zero over the last 60 % of steps."""

    steps: int = 4000
    batch_tokens: int = 2048
    window: int = 320  # positions of a training sequence
    unroll: int = 4  # consecutive drafts simulated in training ("training-time test")
    early_unroll: int = 1  # the same in the first steps, which learn more from more text than from deeper drafts
    early: float = 0.65  # share of these steps
    decay: float = 0.9  # loss weight per depth: a draft is used only if all before it were accepted
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 1e-3  # AdamW: output matrix and norms
    warmup: int = 50
    seed: int = 0

    def unroll_at(self, step: int) -> int:
        return min(self.unroll, self.early_unroll) if step < self.early * self.steps else self.unroll

    def rate_at(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.6 * self.steps))
