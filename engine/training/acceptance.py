"""How many of a head's drafts the target would keep, found without serving it: from greedy texts of the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.eagle3 import NUM_PLACES, TrainedEagle3
from engine.training.store import WrittenText


@dataclass(frozen=True, slots=True)
class HeldOutAcceptance:
    """How many drafts were made and how many were kept, at each position of a chain of drafts."""

    drafted: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def rate(self) -> float:
        """The acceptance rate: the share of all drafts that are kept."""
        return sum(self.kept) / max(1, sum(self.drafted))

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share at each position; a draft is kept only if all before it are."""
        return tuple(kept / max(1, drafted) for kept, drafted in zip(self.kept, self.drafted, strict=True))

    def __str__(self) -> str:
        return f"{self.rate:.3f} ({' '.join(f'{share:.2f}' for share in self.by_position)})"


@torch.no_grad()
def measure_acceptance(
    head: TrainedEagle3, texts: Seq[WrittenText], embedding: Tensor, drafts: int, device: torch.device
) -> HeldOutAcceptance:
    """Walk through the continuation of each greedy text as decoding would, with `drafts` drafts in each step.

    A chain of drafts is right as long as it is the text, so all chains can be made at once, fed with the text.
    """
    drafted, kept = [0] * drafts, [0] * drafts
    for text in texts:
        right = _right(head, text, embedding, drafts, device)
        known = text.prompt + 1  # the first token comes with the prompt
        while known < len(text.tokens):
            wanted = min(drafts, len(text.tokens) - known)
            good = next((j for j in range(wanted) if not right[j][known - 2]), wanted)
            for j in range(wanted):
                drafted[j] += 1
                kept[j] += j < good
            known += good + 1
    return HeldOutAcceptance(tuple(drafted), tuple(kept))


def _right(
    head: TrainedEagle3, text: WrittenText, embedding: Tensor, drafts: int, device: torch.device
) -> list[list[bool]]:
    """For draft j of the chain from position t, whether it is token t + 2 + j of the text."""
    tokens, width = text.tokens.to(device), embedding.shape[1]
    hidden = text.rows.to(device)[None, :, : NUM_PLACES * width]
    with torch.autocast(device.type, torch.bfloat16):
        chains = head.unroll(hidden, embedding[tokens[1:]][None], drafts)
        guesses = [head.kept[logits[0].argmax(-1)] for logits in chains]
    return [(guess[: len(tokens) - 2 - j] == tokens[2 + j :]).tolist() for j, guess in enumerate(guesses)]
