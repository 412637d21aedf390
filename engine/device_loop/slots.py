"""Sequences on the device: the data of a round, one slot per sequence.

The host writes a slot when a sequence is placed, and changes before each round; `send` copies them to the device
(docs/adr/0021-rounds-on-the-device.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pilotfish.engine.kernels.args import Tracks
from pilotfish.engine.kernels.paging import send
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.sampling.distribution import signed

_ALIGNED = 16  # words, and columns: a kernel would be compiled again for another alignment


class StagedWrites:
    """Tensors in one block of device memory, in 32-bit words.

    `tensor[i] = 5` on CUDA is a copy from pageable memory, for which the host waits until the device has finished all
    work. So `write` only stages a number, and `send` sends all staged numbers in one copy and one scatter, queued
    behind earlier launches; without staged numbers it does nothing.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        self._starts, end = dict[str, int](), 0
        for name, (dtype, shape) in shapes.items():
            self._starts[name] = end
            end += -(-_words(dtype, shape) // _ALIGNED) * _ALIGNED
        self._words = torch.zeros(end, dtype=torch.int32, device=device)
        self._tensors = {
            name: self._words[self._starts[name] :][: _words(dtype, shape)].view(dtype).view(shape)
            for name, (dtype, shape) in shapes.items()
        }
        self._new = defaultdict[str, dict[int, float]](dict)  # by name, and by place in the flattened tensor

    def __getitem__(self, name: str) -> Tensor:
        """A tensor on the device."""
        return self._tensors[name]

    def write(self, name: str, first: int, *numbers: float) -> None:
        """Stage numbers for the elements from `first` on of a flattened tensor; later writes override earlier ones."""
        self._new[name].update(enumerate(numbers, first))

    def send(self) -> None:
        """Copy the staged numbers to the device."""
        if not self._new:
            return
        at, numbers = list[Tensor](), list[Tensor]()
        for name, new in self._new.items():
            dtype = self._tensors[name].dtype
            width = dtype.itemsize // 4
            # The words of elements 3 and 5 of 64-bit numbers from word 10 on: 16, 17, 20, 21.
            first = self._starts[name] + width * torch.tensor(list(new), dtype=torch.int64)
            at.append((first[:, None] + torch.arange(width)).flatten())
            numbers.append(torch.tensor(list(new.values()), dtype=dtype).view(torch.int32))
        packed = send(torch.cat([*(words.view(torch.int32) for words in at), *numbers]), self._words.device)
        end = 2 * sum(map(len, at))
        self._words.index_copy_(0, packed[:end].view(torch.int64), packed[end:])
        self._new.clear()


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize // 4


IDLE = 0  # a slot without a sequence, for idle places of a batch
MOST_ENDS = 8  # maximum number of end tokens

LENGTH, MAX_LENGTH, RUNNING, NUM_DRAFT, REJECTS, SEED, TOP_K = range(7)  # rows of `DeviceSlots.whole`


class Tables:
    """The page tables of one model's arena, by slot: `[slots, width + 1]`.

    Unused entries are `spare_page`, which belongs to no sequence and receives writes beyond its pages. The last column,
    for position -1, is always spare.
    """

    def __init__(self, staged: StagedWrites, name: str, spare_page: int) -> None:
        self.pages, self.spare_page = staged[name].fill_(spare_page), spare_page
        self._staged, self._name, self._entered = staged, name, [0] * len(self.pages)

    @property
    def width(self) -> int:
        """Maximum number of pages of a sequence."""
        return self.pages.shape[1] - 1

    def enter(self, slot: int, pages: Seq[int]) -> None:
        """Stage the new entries of a sequence's page table."""
        first = self._entered[slot]
        assert len(pages) <= self.width, "more pages than the longest sequence has"
        if len(pages) > first:
            self._staged.write(self._name, slot * self.pages.shape[1] + first, *pages[first:])
            self._entered[slot] = len(pages)

    def clear(self, slot: int) -> None:
        """Clear the slot for another sequence: the pages of the previous one may have been reused."""
        self.pages[slot].fill_(self.spare_page)
        self._entered[slot] = 0


class DeviceSlots:
    """`num_slots` sequences of at most `longest` tokens, and their pages in the target's and the draft's arena."""

    def __init__(
        self, num_slots: int, longest: int, width: int, spare_pages: tuple[int, int], vocab: int, device: torch.device
    ) -> None:
        size, int64 = num_slots + 1, torch.int64
        self.vocab, self._columns = vocab, -(-size // _ALIGNED) * _ALIGNED
        pages = torch.int32, (size, width + 1)
        self._staged = StagedWrites(
            {
                "whole": (int64, (7, self._columns)), "ends": (int64, (size, MOST_ENDS)),
                "top_p": (torch.float64, (size,)), "min_p": (torch.float64, (size,)),
                "temperature": (torch.float32, (size,)), "target": pages, "draft": pages,
            },
            device,
        )  # fmt: skip
        self.target, self.draft = (
            Tables(self._staged, name, spare) for name, spare in zip(("target", "draft"), spare_pages, strict=True)
        )
        self.whole = self._staged["whole"]  # [7, columns]
        for row, value in ((LENGTH, 1), (MAX_LENGTH, 1), (TOP_K, vocab)):
            self.whole[row].fill_(value)
        self.tracks = Tracks(
            tokens=torch.zeros((size, longest), dtype=int64, device=device),
            length=self.whole[LENGTH],
            max_length=self.whole[MAX_LENGTH],
            ends=self._staged["ends"].fill_(-1),
            running=self.whole[RUNNING],
        )
        self.temperature, self.min_p = self._staged["temperature"], self._staged["min_p"]
        self.top_p = self._staged["top_p"].fill_(1)

    def place(
        self, slot: int, tokens: Seq[int], max_length: int, ends: Seq[int], sampling: SamplingParams, seed: int, *,
        num_draft: int = 0, rejects: bool = False,
    ) -> None:  # fmt: skip
        """Fill a slot except its pages. Copies tokens immediately, the rest by `send`. `rejects`: rejection rule."""
        self.target.clear(slot)
        self.draft.clear(slot)
        new = send(torch.tensor(tokens, dtype=torch.int64), self.tracks.tokens.device)
        self.tracks.tokens[slot, : len(new)].copy_(new)
        self._staged.write("ends", slot * MOST_ENDS, *ends, *[-1] * (MOST_ENDS - len(ends)))
        whole = {
            LENGTH: len(tokens), MAX_LENGTH: max_length, NUM_DRAFT: num_draft, REJECTS: int(rejects), RUNNING: 1,
            TOP_K: min(sampling.top_k or self.vocab, self.vocab), SEED: signed(seed),
        }  # fmt: skip
        for row, value in whole.items():
            self._staged.write("whole", row * self._columns + slot, value)
        for name in ("temperature", "min_p"):
            self._staged.write(name, slot, getattr(sampling, name))
        self._staged.write("top_p", slot, sampling.least_mass)

    def set_num_draft(self, slot: int, num_draft: int) -> None:
        """Set the number of drafts of this sequence per round, at most the round's K."""
        self._staged.write("whole", NUM_DRAFT * self._columns + slot, num_draft)

    def send(self) -> None:
        """Copy changes since the last call to the device. Rounds launched earlier read the old values."""
        self._staged.send()
