"""One round of speculative decoding as a function of device state, without transfers to or from the host.

The plain loop (`engine.engine`) is the specification. Both give the same tokens: with the coupled rule always, with the
rejection rule for the same drafts (docs/adr/0021-rounds-on-the-device.md, 0025-mixed-batches.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pilotfish.engine.attention.registry import Attend, Ragged
from pilotfish.engine.device_loop.layout import DeviceModel, LaidOut, Layout, Pass
from pilotfish.engine.device_loop.slots import LENGTH, MAX_LENGTH, NUM_DRAFT, REJECTS, DeviceSlots
from pilotfish.engine.kernels.args import Committed, SamplerRows, Tracks
from pilotfish.engine.model.runner import logits_of
from pilotfish.engine.sampling import noise
from pilotfish.engine.sampling.distribution import draw, probabilities
from pilotfish.engine.sampling.noise import Stream
from pilotfish.engine.verify import NO_DRAFT, rejection

Run = Callable[[Tensor, Callable[[], None]], Committed]  # slots, and a callback between drafting and verification


@dataclass(frozen=True, slots=True)
class RoundOps:
    """The operations of a round besides the models and `distribution.draw`: kernels, or plain torch."""

    attend: Attend
    commit: Callable[[Tensor, Tensor, Tensor, Tensor, Tracks], Committed]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a round, and their distributions, if a rule needs them."""

    tokens: Tensor  # [B, K] int64
    probs: Tensor | None  # [B, K, vocab] float64


class Round:
    """B places, K drafts. `state` and the arenas are changed in place, at the same addresses in every call.

    `truncated`: whether any sequence may have a top-k, top-p or min-p; `rejects`: whether any uses the rejection rule.
    """

    def __init__(
        self, state: DeviceSlots, target: DeviceModel, draft: DeviceModel | None, ops: RoundOps, size: int, k: int, *,
        truncated: bool = True, rejects: bool = False,
    ) -> None:  # fmt: skip
        assert draft is not None or k == 0, "drafts need a draft model"
        self._state, self._ops, self._truncated, self._rejects = state, ops, truncated, rejects
        self.size, self.k, self.device = size, k, state.tracks.tokens.device
        resampled, drawn = (Stream.RESAMPLE, Stream.DRAFT) if rejects else (None, None)
        verified, drafted = [Pass(k + 1, -1, k + 1)], [Pass(2, -2), *(Pass(1, i) for i in range(k - 1))]
        self._target = Layout(state, state.target, target, size, verified, truncated=truncated, apart=resampled)
        self._draft: Layout | None = None
        if draft is not None and k:
            self._draft = Layout(state, state.draft, draft, size, drafted, truncated=truncated, apart=drawn)
        self._steps = torch.arange(k, device=self.device)
        self._no_drafts = torch.full((size, k), NO_DRAFT, device=self.device)

    def __call__(self, slots: Tensor, between: Callable[[], None]) -> Committed:
        """Run the round operation by operation, and call `between` between drafting and verification."""
        drafts = self.propose(slots)
        between()
        return self.verify(slots, drafts)

    @torch.inference_mode()
    def propose(self, slots: Tensor) -> Drafts:
        """Sample drafts: with the target's noise under the coupled rule, with separate noise under the rejection rule.

        `slots` int64 `[B]`, `resident.IDLE` for idle places.
        """
        if self._draft is None:
            nothing = slots.new_empty((self.size, 0))
            no_probs = self._state.temperature.new_empty((self.size, 0, self._state.vocab), dtype=torch.float64)
            return Drafts(nothing, no_probs if self._rejects else None)
        layout = self._draft
        laid, tokens, found = layout.of(slots), list[Tensor](), list[Tensor]()
        newest = layout.rows(0)
        ids = self._state.tracks.tokens[laid.owner[newest], laid.position_ids[newest]]
        for i in range(self.k):
            logits = self._run(layout, laid, i, ids)
            samplers = layout.samplers(laid, i)
            if self._rejects:
                found.append(probabilities(logits, samplers, truncated=self._truncated))
            ids = draw(logits, samplers, truncated=self._truncated).token
            tokens.append(ids)
        return Drafts(torch.stack(tokens, 1), torch.stack(found, 1) if found else None)

    @torch.inference_mode()
    def verify(self, slots: Tensor, drafts: Drafts) -> Committed:
        """Verify and commit. Drafts beyond the sequence's maximum length are not verified."""
        tracks, layout = self._state.tracks, self._target
        laid = layout.of(slots)
        each = layout.sequences(laid)
        newest = tracks.tokens[slots, laid.position[layout.rows(0)].view(self.size, -1)[:, 0]]
        logits = self._run(layout, laid, 0, torch.cat([newest[:, None], drafts.tokens], 1))
        samplers = layout.samplers(laid, 0)
        chosen = draw(logits, samplers, truncated=self._truncated)
        drawn = chosen.token.view(self.size, -1)
        num_sound = chosen.sound.view(self.size, -1).long().cumprod(1).sum(1)
        most = each[NUM_DRAFT].minimum(each[MAX_LENGTH] - each[LENGTH] - 1)
        tokens = torch.where(self._steps < most[:, None], drafts.tokens, self._no_drafts)
        if drafts.probs is not None:
            mine = each[REJECTS][:, None] > 0
            decided, kept = self._judged(logits, samplers, tokens, drafts.probs)
            drawn, tokens = torch.where(mine, decided, drawn), torch.where(mine, kept, tokens)
        return self._ops.commit(drawn, tokens, num_sound, slots, tracks)

    def _run(self, layout: Layout, laid: LaidOut, i: int, ids: Tensor) -> Tensor:
        """Pass i: logits `[B * draws, vocab]`."""
        fed = layout.fed
        return logits_of(fed.model, Ragged(layout.batch(laid, i, ids), fed.arena, self._ops.attend))

    def _judged(
        self, logits: Tensor, samplers: SamplerRows, drafts: Tensor, draft_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rejection rule in the form that commit expects: tokens `[B, K + 1]`, and the drafts that equal them."""
        shape = self.size, self.k + 1, -1
        target_probs = probabilities(logits, samplers, truncated=self._truncated).view(shape)
        accept = noise.uniform(samplers.seed, samplers.position, Stream.ACCEPT).view(self.size, -1)[:, : self.k]
        given = draft_probs * (drafts != NO_DRAFT)[..., None]
        verdict = rejection(target_probs, given, drafts, accept, partial(self._resampled, samplers))
        is_kept = self._steps < verdict.num_accepted[:, None]
        next_token = verdict.next_token[:, None]
        decided = torch.cat([torch.where(is_kept, drafts, next_token), next_token], 1)
        return decided, torch.where(is_kept, drafts, NO_DRAFT)

    def _resampled(self, samplers: SamplerRows, left: Tensor, position: Tensor) -> Tensor:
        mine = samplers.rows(torch.arange(self.size, device=self.device) * (self.k + 1) + position)
        shaped = replace(mine, temperature=torch.ones_like(mine.temperature))
        return draw(left.float(), shaped, truncated=False).token
