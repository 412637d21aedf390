"""Training of a head on texts with the target's hidden states: batches, loss, optimisers, and checkpoints.

The data of a step depends only on the step and the seed, so an interrupted run ends with the same bytes as an
uninterrupted one, on one machine and with the same number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from pilotfish.engine.training.eagle3 import NUM_PLACES, TrainedEagle3
from pilotfish.engine.training.store import RunFolder, Schedule, TargetParts, WrittenText


@dataclass(frozen=True, slots=True)
class HeldOutAcceptance:
    """Drafted and accepted tokens by chain position, computed offline from greedy texts of the target."""

    drafted: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def rate(self) -> float:
        return sum(self.kept) / max(1, sum(self.drafted))

    @property
    def by_position(self) -> tuple[float, ...]:
        """The acceptance rate by position; a draft is accepted only if all before it are."""
        return tuple(kept / max(1, drafted) for kept, drafted in zip(self.kept, self.drafted, strict=True))

    def __str__(self) -> str:
        return f"{self.rate:.3f} ({' '.join(f'{share:.2f}' for share in self.by_position)})"


@torch.no_grad()
def measure_acceptance(
    head: TrainedEagle3, texts: Seq[WrittenText], embedding: Tensor, drafts: int, device: torch.device
) -> HeldOutAcceptance:
    """Simulate decoding of each greedy text, with `drafts` drafts in each step.

    A chain of drafts is accepted while it equals the text, so all chains are computed at once, fed with the text.
    """
    drafted, kept = [0] * drafts, [0] * drafts
    for text in texts:
        right = _right(head, text, embedding, drafts, device)
        known = text.prompt + 1  # the first token follows from the prompt
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
    """Whether draft j of the chain from position t equals token t + 2 + j of the text."""
    tokens, width = text.tokens.to(device), embedding.shape[1]
    hidden = text.rows.to(device)[None, :, : NUM_PLACES * width]
    with torch.autocast(device.type, torch.bfloat16):
        chains = head.unroll(hidden, embedding[tokens[1:]][None], drafts)
        guesses = [head.kept[logits[0].argmax(-1)] for logits in chains]
    return [(guess[: len(tokens) - 2 - j] == tokens[2 + j :]).tolist() for j, guess in enumerate(guesses)]


STATE = "state"
SAVE_EVERY = 200  # steps


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The result of a step: losses in nats, one per draft depth; held-out acceptance if it was measured."""

    step: int
    losses: tuple[float, ...]
    acceptance: HeldOutAcceptance | None = None


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of pieces of texts, each padded at its end.

    Attributes:
        tokens: int64 `[batch, length + 1]`.
        rows: bfloat16 `[batch, length, (places + 1) * hidden]`.
        is_true: bool `[batch, length]`, False where a row is padding.
    """

    tokens: Tensor
    rows: Tensor
    is_true: Tensor


def windows(texts: Seq[WrittenText], schedule: Schedule, first: int) -> Iterator[tuple[int, TrainingBatch]]:
    """The steps from `first` and their batches: windows of texts, drawn in proportion to their lengths."""
    lengths = np.array([len(text.rows) for text in texts])
    weights = lengths / lengths.sum()
    for step in range(first, schedule.steps):
        dice = np.random.default_rng((schedule.seed, step))
        chosen = dice.choice(len(texts), max(1, schedule.batch_tokens // schedule.window), p=weights)
        starts = [int(dice.integers(0, max(1, lengths[i] - schedule.window + 1))) for i in chosen]
        drawn = [(texts[i], slice(start, start + schedule.window)) for i, start in zip(chosen, starts, strict=True)]
        tokens = [text.tokens[span.start : span.stop + 1] for text, span in drawn]
        rows = [text.rows[span] for text, span in drawn]
        parts = tokens, rows, [torch.ones(len(each), dtype=torch.bool) for each in rows]
        yield step, TrainingBatch(*(pad_sequence(part, batch_first=True) for part in parts))


class HeadTrainer:
    """A head, its two optimisers, and a checkpoint of all three in the folder of the run."""

    def __init__(
        self, head: TrainedEagle3, parts: TargetParts, schedule: Schedule, folder: RunFolder, device: torch.device
    ) -> None:
        """Resume or start the run in `folder`. Raises ModelError if its state cannot be read."""
        self.head, self.schedule, self._folder, self._device = head.to(device), schedule, folder, device
        kept = self.head.kept
        self._logits = parts.logits
        self._embedding, self._output = parts.embedding.to(device), parts.output.to(device)[kept]
        named = list(head.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and name != "lm_head.weight"]
        others = [p for name, p in named if p.ndim != 2 or name == "lm_head.weight"]
        self._optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=schedule.matrix_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=schedule.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step = 0
        if folder.has(STATE):
            self._load()

    def run(self, texts: Seq[WrittenText], held_out: Seq[WrittenText], report: Callable[[TrainingStep], None]) -> None:
        """Train to the last step; `report` is called after each, with the acceptance when a checkpoint is written."""
        for step, batch in windows(texts, self.schedule, self.step):
            losses = self._one_step(step, batch)
            self.step = step + 1
            is_kept = self.step % SAVE_EVERY == 0 or self.step == self.schedule.steps
            if is_kept:
                self._save()
            report(TrainingStep(self.step, losses, self.acceptance(held_out) if is_kept else None))

    def acceptance(self, held_out: Seq[WrittenText]) -> HeldOutAcceptance:
        """The head's acceptance on held-out texts."""
        return measure_acceptance(self.head, held_out, self._embedding, self.schedule.unroll, self._device)

    def losses(self, batch: TrainingBatch, unroll: int) -> list[Tensor]:
        """KL(target || head) in nats, averaged over positions, for each of `unroll` draft depths.

        Both distributions are over the tokens that the head can draft, and sum to 1 over these.
        """
        tokens, rows, is_true = (part.to(self._device) for part in (batch.tokens, batch.rows, batch.is_true))
        width = self._embedding.shape[1]
        hidden, features = rows.split([NUM_PLACES * width, width], -1)
        with torch.autocast(self._device.type, torch.bfloat16):
            with torch.no_grad():
                target = self._logits(features, self._output).log_softmax(-1)
                embedded = self._embedding[tokens[:, 1:]]
            found = []
            for j, logits in enumerate(self.head.unroll(hidden, embedded, unroll), start=1):
                wanted, known = target[:, j:], is_true[:, j:]
                got = logits[:, : wanted.shape[1]].float().log_softmax(-1)
                away = F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
                found.append((away * known).sum() / known.sum().clamp(min=1))
        return found

    def _one_step(self, step: int, batch: TrainingBatch) -> tuple[float, ...]:
        losses = self.losses(batch, self.schedule.unroll_at(step))
        torch.stack([self.schedule.decay**j * loss for j, loss in enumerate(losses)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        rates = (self.schedule.matrix_lr, self.schedule.other_lr)
        for optimiser, rate in zip(self._optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * self.schedule.rate_at(step)
            optimiser.step()
            optimiser.zero_grad()
        return tuple(loss.item() for loss in losses)

    def _save(self) -> None:
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for i, optimiser in enumerate(self._optimisers):
            for j, parameter in enumerate(optimiser.param_groups[0]["params"]):
                tensors |= {f"{i}.{j}.{key}": torch.as_tensor(v) for key, v in optimiser.state[parameter].items()}
        self._folder.save(STATE, tensors, {"step": json.dumps(self.step)})

    def _load(self) -> None:
        tensors, notes = self._folder.load(STATE)
        self.head.load_state_dict({key[5:]: value for key, value in tensors.items() if key.startswith("head.")})
        for i, optimiser in enumerate(self._optimisers):
            for j, parameter in enumerate(optimiser.param_groups[0]["params"]):
                mark = f"{i}.{j}."
                own = {key.removeprefix(mark): value for key, value in tensors.items() if key.startswith(mark)}
                # Step counts stay on the host, where the optimiser creates them.
                optimiser.state[parameter] = {
                    k: v.clone() if k == "step" else v.clone().to(self._device) for k, v in own.items()
                }
        self.step = json.loads(notes["step"])
