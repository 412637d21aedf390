"""One round of speculative decoding as a function of state on the device: the host reads nothing and sends nothing.

The plain loop (`engine.engine`) is the specification, and both give the same tokens: under the coupled rule always,
under the rejection rule for the same drafts (docs/adr/0021-rounds-on-the-device.md, 0025-riders-beside-plain-steps.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine import draws, noise
from engine.attention.paged import key_of
from engine.attention.registry import Attend, Ragged
from engine.batch import RaggedBatch
from engine.kernels.args import Committed, Laws, Tracks
from engine.kernels.paging import Paging, tile_size
from engine.kv import KVArena
from engine.noise import Stream
from engine.resident import Resident, Tables
from engine.verify import NO_DRAFT, rejection


class Choose(Protocol):
    """`engine.kernels.sampling.choose`, or `engine.draws.choose`, which means the same."""

    def __call__(self, logits: Tensor, laws: Laws, *, cuts: bool = True) -> Tensor:
        """One token per row."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """What a round is made of besides the models: kernels, or plain torch."""

    attend: Attend
    choose: Choose
    commit: Callable[[Tensor, Tensor, Tensor, Tensor, Tracks], Committed]


@dataclass(frozen=True, slots=True)
class Fed:
    """A model, its arena with one page more than are given away, and what its passes have in common."""

    model: PreTrainedModel
    arena: KVArena
    positions: int  # that the model knows

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        heads: int = self.model.config.get_text_config().num_attention_heads
        return heads // self.arena.layout.kv_heads


@dataclass(frozen=True, slots=True)
class Brought:
    """What a round brought B sequences."""

    drawn: Tensor  # [B, K + 1] int64, of which the first `committed.num_fresh` count
    committed: Committed


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the draft model proposed, and the laws that it was drawn from, where a rule asks for them."""

    tokens: Tensor  # [B, K] int64
    laws: Tensor | None  # [B, K, vocab] float64


class Round:
    """B places, K drafts. `state` and the arenas are changed in place; the same addresses in every call.

    `cuts` says whether any of its sequences may have a top-k, top-p or min-p, `rejects` whether any is of that rule.
    """

    def __init__(
        self,
        state: Resident,
        target: Fed,
        draft: Fed | None,
        ops: Ops,
        size: int,
        k: int,
        *,
        cuts: bool = True,
        rejects: bool = False,
    ) -> None:
        assert draft is not None or k == 0, "drafts need a draft model"
        self._state, self._ops, self._cuts, self._rejects = state, ops, cuts, rejects
        self.size, self.k, self.device = size, k, state.tracks.tokens.device
        device, attend = self.device, ops.attend
        self._verify = _Pass(state.target, target, attend, size, k + 1, k + 1, device)
        self._draft_first = _Pass(state.draft, draft, attend, size, 2, 1, device) if draft and k else None
        self._draft_next = _Pass(state.draft, draft, attend, size, 1, 1, device) if draft and k > 1 else None
        self._steps = torch.arange(k + 1, device=device)
        self._two = torch.arange(-2, 0, device=device)

    @torch.inference_mode()
    def propose(self, slots: Tensor) -> Drafts:
        """The draft's own draws: with the noise that the target will draw with, or apart under the rejection rule.

        `slots` int64 `[B]`, `resident.IDLE` for idle places.
        """
        if self._draft_first is None:
            nothing = slots.new_empty((self.size, 0))
            laws = self._state.temperature.new_empty((self.size, 0, self._state.vocab), dtype=torch.float64)
            return Drafts(nothing, laws if self._rejects else None)
        length = self._state.tracks.length[slots]
        fed = self._state.tracks.tokens[slots[:, None], (length[:, None] + self._two).clamp(min=0)]
        logits = self._draft_first(fed, length - 2, slots)
        drafts = [self._draw(logits, slots, length, 0)]
        for i in range(1, self.k):
            assert self._draft_next is not None
            logits = self._draft_next(drafts[-1].tokens[:, None], length - 1 + i, slots)
            drafts.append(self._draw(logits, slots, length, i))
        found = [draft.laws for draft in drafts if draft.laws is not None]
        return Drafts(torch.stack([draft.tokens for draft in drafts], 1), torch.stack(found, 1) if found else None)

    @torch.inference_mode()
    def verify(self, slots: Tensor, drafts: Drafts) -> Brought:
        """Verify and commit what stays. A draft that could only be followed by nothing is not looked at."""
        state, tracks = self._state, self._state.tracks
        length = tracks.length[slots]
        newest = tracks.tokens[slots, length - 1]
        logits = self._verify(torch.cat([newest[:, None], drafts.tokens], 1), length - 1, slots)
        laws = state.laws(slots, length, self._steps, Stream.RESAMPLE)
        drawn = self._ops.choose(logits, laws, cuts=self._cuts).view(self.size, -1)
        is_number = logits.amax(-1).isfinite().view(self.size, -1)
        num_sound = is_number.long().cumprod(1).sum(1)
        most = state.num_draft[slots].minimum(tracks.max_length[slots] - length - 1)
        tokens = torch.where(self._steps[: self.k] < most[:, None], drafts.tokens, NO_DRAFT)
        if drafts.laws is not None:
            mine = state.rejects[slots][:, None] > 0
            decided, kept = self._judged(logits, laws, tokens, drafts.laws)
            drawn, tokens = torch.where(mine, decided, drawn), torch.where(mine, kept, tokens)
        return Brought(drawn, self._ops.commit(drawn, tokens, num_sound, slots, tracks))

    def _judged(self, logits: Tensor, laws: Laws, drafts: Tensor, draft_laws: Tensor) -> tuple[Tensor, Tensor]:
        """The rejection rule in words that a commit knows: tokens `[B, K + 1]`, and the drafts that equal them."""
        shape = self.size, self.k + 1, -1
        target_laws = draws.probabilities(logits, laws, cuts=self._cuts).view(shape)
        vocab = target_laws.shape[-1]
        accept = noise.uniform(laws.seed, laws.position, Stream.ACCEPT).view(self.size, -1)[:, : self.k]
        resample = noise.gumbel(laws.seed, laws.position, laws.stream, vocab).view(shape)
        given = draft_laws * (drafts != NO_DRAFT)[..., None]
        verdict = rejection(target_laws, given, drafts, accept, resample)
        is_kept = self._steps[: self.k] < verdict.num_accepted[:, None]
        next_token = verdict.next_token[:, None]
        decided = torch.cat([torch.where(is_kept, drafts, next_token), next_token], 1)
        return decided, torch.where(is_kept, drafts, NO_DRAFT)

    def _draw(self, logits: Tensor, slots: Tensor, length: Tensor, i: int) -> Drafts:
        laws = self._state.laws(slots, length, self._steps[i : i + 1], Stream.DRAFT)
        found = draws.probabilities(logits, laws, cuts=self._cuts) if self._rejects else None
        return Drafts(self._ops.choose(logits, laws, cuts=self._cuts), found)


class _Pass:
    """Forward passes of one shape: `rows` tokens of each of `size` sequences, logits of the last `wanted`."""

    def __init__(
        self, tables: Tables, fed: Fed, attend: Attend, size: int, rows: int, wanted: int, device: torch.device
    ) -> None:
        self._tables, self._fed, self._attend = tables, fed, attend
        step = tile_size(fed.group) // fed.group
        tiles = [(i, first) for i in range(size) for first in range(0, rows, step)]
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._first = torch.arange(0, size * rows, rows, device=device)
        self._rows = torch.arange(rows, device=device)
        self._num_rows = torch.full((size,), rows, device=device)
        self._logit_rows = (self._first[:, None] + self._rows[rows - wanted :]).flatten()

    def __call__(self, ids: Tensor, start: Tensor, slots: Tensor) -> Tensor:
        """Feed `ids` `[B, rows]` from positions `start` `[B]` on: logits `[B * wanted, vocab]`."""
        position = (start[:, None] + self._rows).flatten()
        tables, page_size = self._tables.pages, self._fed.arena.page_size
        num_keys = tables.shape[1] * page_size
        spans = torch.stack([self._first, self._num_rows, start, slots], 1).int()
        batch = RaggedBatch(
            input_ids=ids.flatten(),
            positions=position,
            position_ids=position.clamp(0, self._fed.positions - 1),
            kv_rows=self._kv_rows(position, slots, num_keys),
            logit_rows=self._logit_rows,
            cu_seqlens=(),
            kv_lens=(),
            page_tables=(),
            page_size=page_size,
            is_contiguous=(),
        )
        batch.once(key_of(self._fed.group), lambda: Paging(self._tiles, spans, tables, page_size, num_keys))
        model: Any = self._fed.model
        output = model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=self._logit_rows,
            ragged=Ragged(batch, self._fed.arena, self._attend),
        )
        logits: Tensor = output.logits[0]
        return logits

    def _kv_rows(self, position: Tensor, slots: Tensor, num_keys: int) -> Tensor:
        """Arena rows of the new K/V; what lies before position 0 goes to the page of nobody, as idle rows do."""
        page_size, spare = self._fed.arena.page_size, self._tables.spare_page
        owner = slots[:, None].expand(-1, len(self._rows)).flatten()
        at = position.clamp(0, num_keys - 1)
        page = self._tables.pages[owner, at // page_size].long()
        return torch.where(position < 0, spare, page) * page_size + at % page_size
