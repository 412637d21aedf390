"""The arena rows of a round's passes, and their sampling parameters.

None of this depends on the tokens that are drawn, so it is computed once for all passes of a model: separate launches
per pass would cost more than the computation.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pilotfish.engine.attention.paged import keys_of
from pilotfish.engine.device_loop.slots import LENGTH, REJECTS, SEED, TOP_K, DeviceSlots, Tables
from pilotfish.engine.kernels.args import SamplerRows
from pilotfish.engine.kernels.paging import Paging, send, tile_of
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.sampling.noise import Stream

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel

_ALIGNED = 4  # rows: inputs of a pass begin at a multiple of 16 bytes; otherwise kernels would be compiled again


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model, its arena with one spare page, and data shared by its passes."""

    model: DecoderModel
    arena: KVArena
    positions: int  # supported by the model

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        heads: int = self.model.config.get_text_config().num_attention_heads
        kv_heads = self.arena.layout.heads
        assert kv_heads is not None, "rounds are for models whose layers have one number of K/V heads"
        return heads // kv_heads


@dataclass(frozen=True, slots=True)
class Pass:
    """Feeds `rows` tokens of each sequence from position length + `begin`; the last `draws` rows are sampled."""

    rows: int
    begin: int
    draws: int = 1


@dataclass(frozen=True, slots=True)
class LaidOut:
    """R rows: F rows fed by all passes, pass by pass, then the rows that are drawn from, pass by pass.

    Within a pass the rows of a sequence are consecutive.
    """

    owner: Tensor  # [R] int64, the slot of each
    whole: Tensor  # [7, R] int64, the `resident` fields of its sequence
    position: Tensor  # [R] int64, -1 where a sequence has no token yet
    position_ids: Tensor  # [F] int64, none below 0
    kv_rows: Tensor  # [F] int64, of the arena
    spans: Tensor  # [passes, B, 4] int32, as in `Paging`
    drawn: SamplerRows  # of R rows, of which only the drawn ones are used


class Layout:
    """Lays out the `passes` of the model `fed` for `size` sequences.

    `truncated`: whether any row may have a top-k, top-p or min-p. `apart`: noise stream of rows with the rejection
    rule; None: no sequence uses it.
    """

    def __init__(
        self, state: DeviceSlots, tables: Tables, fed: DeviceModel, size: int, passes: Seq[Pass], *, truncated: bool,
        apart: Stream | None,
    ) -> None:  # fmt: skip
        self.fed, page_size, tile_rows = fed, fed.arena.page_size, tile_of(fed.group).rows
        self._state, self._tables, self._size, self._passes = state, tables, size, passes
        self._page_size, self._truncated, self._apart = page_size, truncated, apart
        self._slices, place, offset = list[slice](), list[int](), list[int]()
        drawn = [Pass(p.draws, p.begin + p.rows - p.draws + 1) for p in passes]  # a row's token is fed one later
        for rows in (*passes, *drawn):
            self._slices.append(slice(len(place), len(place) + size * rows.rows))
            place += [i for i in range(size) for _ in range(rows.rows)]
            offset += [rows.begin + j for _ in range(size) for j in range(rows.rows)]
            idle = -len(place) % _ALIGNED
            place, offset = [*place, *[0] * idle], [*offset, *[0] * idle]
        self._num_fed = self._slices[len(passes)].start
        assert state.tracks.tokens.shape[1] + max(offset) <= tables.width * page_size, "positions beyond the tables"
        spans = [[(i * p.rows, p.rows, p.begin, 0) for i in range(size)] for p in passes]
        tiles = [[(i, first) for i in range(size) for first in range(0, p.rows, tile_rows)] for p in passes]
        wanted = [[i * p.rows + j for i in range(size) for j in range(p.rows - p.draws, p.rows)] for p in passes]
        self._device = state.tracks.tokens.device
        self._place, self._offset, self._spans = self._up(place), self._up(offset), self._up(spans).int()
        self._tiles, self._logit_rows = [self._up(each).int() for each in tiles], [self._up(each) for each in wanted]
        self._keys, self._nothing = keys_of(fed.group), torch.zeros(size, dtype=torch.int64, device=self._device)
        self._coupled = torch.full_like(self._place, int(Stream.COUPLED))
        self._off = self._nothing.new_zeros(len(place)).double(), self._nothing.new_ones(len(place)).double()

    def of(self, slots: Tensor) -> LaidOut:
        """For the sequences in `slots`, int64 `[B]`."""
        state, page_size, pages = self._state, self._page_size, self._tables.pages
        owner = slots[self._place]
        whole = state.whole.index_select(1, owner)
        position = whole[LENGTH] + self._offset
        filled, its = position[: self._num_fed], owner[: self._num_fed]
        # Position -1 is in page -1, the last column: writes before the first token go to the spare page.
        kv_rows = torch.add(filled % page_size, pages[its, filled // page_size], alpha=page_size)
        first = self._slices[0].stop // self._size
        moved = torch.stack([self._nothing, self._nothing, whole[LENGTH, : self._slices[0].stop : first], slots], 1)
        spans = torch.add(self._spans, moved, out=torch.empty_like(self._spans))
        ids = filled.clamp(0, self.fed.positions - 1)
        return LaidOut(owner, whole, position, ids, kv_rows, spans, self._samplers(owner, whole, position))

    def _samplers(self, owner: Tensor, whole: Tensor, position: Tensor) -> SamplerRows:
        state, (zeros, ones) = self._state, self._off
        stream = self._coupled
        if self._apart is not None:
            stream = torch.add(stream, whole[REJECTS], alpha=int(self._apart) - int(Stream.COUPLED))
        return SamplerRows(
            temperature=state.temperature[owner],
            top_k=whole[TOP_K],
            top_p=state.top_p[owner] if self._truncated else ones,
            min_p=state.min_p[owner] if self._truncated else zeros,
            seed=whole[SEED],
            position=position,
            stream=stream,
        )

    def rows(self, i: int) -> slice:
        """Of pass i."""
        return self._slices[i]

    def samplers(self, laid: LaidOut, i: int) -> SamplerRows:
        """Of what is drawn after pass i."""
        return laid.drawn.rows(self._slices[len(self._passes) + i])

    def sequences(self, laid: LaidOut) -> Tensor:
        """The `resident` fields of each sequence: int64 `[7, B]`."""
        return laid.whole[:, : self._slices[0].stop : self._passes[0].rows]

    def batch(self, laid: LaidOut, i: int, ids: Tensor) -> RaggedBatch:
        """Pass i with these tokens, `[B, rows]` or flat."""
        mine, tables, page_size = self._slices[i], self._tables, self._page_size
        batch = RaggedBatch(
            input_ids=ids.flatten(),
            positions=laid.position[mine],
            position_ids=laid.position_ids[mine],
            kv_rows=laid.kv_rows[mine],
            logit_rows=self._logit_rows[i],
            cu_seqlens=(),
            kv_lens=(),
            page_tables=(),
            page_size=page_size,
            is_contiguous=(),
        )
        paging = Paging(self._tiles[i], laid.spans[i], tables.pages, page_size, tables.width * page_size)
        for key in self._keys:
            batch.once(key, lambda: paging)
        return batch

    def _up(self, numbers: Seq[object]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.int64), self._device)
