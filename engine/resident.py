"""Sequences that stand on the device: what a round needs of them, one slot each. Knows no model.

The host writes a slot when it admits and when it removes, and never in between (docs/adr/0021-rounds-on-the-device.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.args import Laws, Tracks
from engine.kernels.paging import send
from engine.noise import Stream
from engine.types import SamplingParams

IDLE = 0  # the slot of nobody, for the idle places of a batch
MOST_ENDS = 8  # tokens that may end an output
_FEW = 4  # pages that are cheaper to write one by one than to upload


@dataclass(frozen=True, slots=True)
class Place:
    """What the host says of a sequence that it places."""

    tokens: Seq[int]
    max_length: int
    ends: Seq[int]
    sampling: SamplingParams
    seed: int
    num_draft: int
    rejects: bool = False  # the rejection rule verifies, where it is not the coupled one


class Tables:
    """Which pages of one model's arena hold the sequence in each slot: `[slots, width]`, `spare_page` where none does.

    What is written beyond a sequence's own pages goes to the spare one, which belongs to nobody.
    """

    def __init__(self, size: int, width: int, spare_page: int, device: torch.device) -> None:
        self.pages = torch.full((size, width), spare_page, dtype=torch.int32, device=device)
        self.spare_page, self._entered = spare_page, [0] * size

    def enter(self, slot: int, pages: Seq[int]) -> None:
        """Enter what is new of a sequence's page table. A first long one is uploaded; later pages travel alone."""
        first, fresh = self._entered[slot], pages[self._entered[slot] :]
        if len(fresh) > _FEW:
            self.pages[slot, first : len(pages)] = send(torch.tensor(fresh, dtype=torch.int32), self.pages.device)
        else:
            for i, page in enumerate(fresh, first):
                self.pages[slot, i] = page  # a number travels with the kernel that writes it: no upload
        self._entered[slot] = len(pages)

    def clear(self, slot: int) -> None:
        """The sequence is gone: its pages may be given away."""
        self.pages[slot] = self.spare_page
        self._entered[slot] = 0


class Resident:
    """`num_slots` sequences of at most `longest` tokens, and their pages in the target's and the draft's arena."""

    def __init__(
        self, num_slots: int, longest: int, width: int, spare_pages: tuple[int, int], vocab: int, device: torch.device
    ) -> None:
        size = num_slots + 1
        self.vocab, self._device = vocab, device
        self.target, self.draft = (Tables(size, width, spare, device) for spare in spare_pages)

        def whole(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.tracks = Tracks(
            tokens=whole(size, longest),
            length=whole(size, value=1),
            max_length=whole(size, value=1),
            ends=whole(size, MOST_ENDS, value=-1),
            running=whole(size),
        )
        self.num_draft, self.rejects = whole(size), whole(size)
        self._seed, self._top_k = whole(size), whole(size, value=vocab)
        self.temperature = torch.zeros(size, device=device)
        self._top_p = torch.ones(size, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(size, dtype=torch.float64, device=device)

    def place(self, slot: int, place: Place) -> None:
        """Fill a slot, all but its pages: a few small uploads."""
        tracks, wanted = self.tracks, place.sampling
        tracks.tokens[slot, : len(place.tokens)] = self._up(place.tokens)
        tracks.ends[slot] = self._up([*place.ends, *[-1] * (MOST_ENDS - len(place.ends))])
        top_k = min(wanted.top_k or self.vocab, self.vocab)
        seed = place.seed - 2**64 if place.seed >= 2**63 else place.seed
        whole = [len(place.tokens), place.max_length, place.num_draft, int(place.rejects), seed, top_k, 1]
        homes = (
            tracks.length, tracks.max_length, self.num_draft, self.rejects, self._seed, self._top_k, tracks.running,
        )  # fmt: skip
        for home, value in zip(homes, self._up(whole), strict=True):
            home[slot] = value
        numbers = torch.tensor([wanted.temperature, wanted.top_p, wanted.min_p], dtype=torch.float64)
        reals = send(numbers, self._device)
        for home, value in zip((self.temperature, self._top_p, self._min_p), reals, strict=True):
            home[slot] = value

    def free(self, slot: int) -> None:
        """Let a sequence stand still; its pages may then be given away."""
        self.tracks.running[slot] = 0
        self.target.clear(slot)
        self.draft.clear(slot)

    def set_num_draft(self, slot: int, num_draft: int) -> None:
        """Drafts that this sequence takes of each round's K."""
        self.num_draft[slot] = num_draft

    def laws(self, slots: Tensor, first: Tensor, rows: Tensor, apart: Stream = Stream.COUPLED) -> Laws:
        """Of rows `first[b] + rows[j]` of each sequence: `[B * len(rows)]` each. Runs on the device.

        Under the rejection rule a row's noise is of the stream `apart`.
        """
        position = first[:, None] + rows

        def each(values: Tensor) -> Tensor:
            return values[slots][:, None].expand_as(position).flatten()

        return Laws(
            temperature=each(self.temperature),
            top_k=each(self._top_k),
            top_p=each(self._top_p),
            min_p=each(self._min_p),
            seed=each(self._seed),
            position=position.flatten(),
            stream=int(Stream.COUPLED) + each(self.rejects) * (int(apart) - int(Stream.COUPLED)),
        )

    def _up(self, values: Seq[int]) -> Tensor:
        return send(torch.tensor(values, dtype=torch.int64), self._device)
