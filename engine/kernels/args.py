"""What kernels are given and give back, beside single tensors. Knows no Triton."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

RUNNING, STOPPED, FULL, UNSOUND = range(4)  # what `Committed.ended` says


@dataclass(frozen=True, slots=True)
class Tracks:
    """The sequences that stand on the device, one per slot; a commit changes them in place."""

    tokens: Tensor  # [S, L] int64
    length: Tensor  # [S] int64, how many of them there are
    max_length: Tensor  # [S] int64, at most L
    ends: Tensor  # [S, E] int64, tokens that end the output; -1 where there are fewer
    running: Tensor  # [S] int64, 1 or 0


@dataclass(frozen=True, slots=True)
class Committed:
    """What one round brought each of B sequences: the first `num_fresh` of its drawn tokens."""

    num_fresh: Tensor  # [B] int64, 0 for one that is not running
    num_accepted: Tensor  # [B] int64, drafts among them
    ended: Tensor  # [B] int64, RUNNING, STOPPED at an end token, FULL, or UNSOUND: its logits were no numbers


@dataclass(frozen=True, slots=True)
class Laws:
    """What shapes R rows, all on the device. A row with temperature 0 is greedy and needs nothing else."""

    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int64, the vocabulary size where off
    top_p: Tensor  # [R] float64, 1 where off
    min_p: Tensor  # [R] float64, 0 where off
    seed: Tensor  # [R] int64, the bits of a uint64
    position: Tensor  # [R] int64
    stream: Tensor  # [R] int64

    def dense(self) -> Laws:
        """The same without gaps between numbers: a kernel is told where the first one is."""
        return Laws(*(getattr(self, field.name).contiguous() for field in fields(self)))
