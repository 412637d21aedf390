"""Sequences that stand on the device: what a round needs of them, one slot each. Knows no model.

The host writes a slot when a sequence is placed, and what has changed before a round; `send` brings it up
(docs/adr/0021-rounds-on-the-device.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kernels.args import Tracks
from engine.kernels.paging import send
from engine.params import SamplingParams
from engine.sampling.distribution import signed

_ALIGNED = 16  # words, and columns: a kernel that finds a tensor at another alignment would be compiled anew


@dataclass(frozen=True, slots=True)
class Home:
    """Where one tensor's numbers are to go, and which they are."""

    tensor: Tensor
    first: int  # word of its first number
    new: dict[int, float] = field(default_factory=dict)  # by place in the flattened tensor


class Slate:
    """Tensors in one stretch of device memory, of 32-bit words.

    `tensor[i] = 5` on CUDA is a copy from memory that is not pinned, for which the host waits until the device has
    done all it has to do. So `write` only notes a number, and `send` brings all that were noted up in one copy and one
    scatter, which take their place behind what was launched before: or does nothing, if nothing was noted.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        starts, end = dict[str, int](), 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = end
            end += -(-_words(dtype, shape) // _ALIGNED) * _ALIGNED
        self._words = torch.zeros(end, dtype=torch.int32, device=device)
        self._homes = dict[str, Home]()
        for name, (dtype, shape) in shapes.items():
            mine = self._words[starts[name] : starts[name] + _words(dtype, shape)]
            self._homes[name] = Home(mine.view(dtype).view(shape), starts[name])

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, as the device has it."""
        return self._homes[name].tensor

    def write(self, name: str, first: int, *numbers: float) -> None:
        """Note numbers for places from `first` on of a tensor that is thought of as flat; the last one noted counts."""
        self._homes[name].new.update(enumerate(numbers, first))

    def send(self) -> None:
        """Bring up what was noted."""
        homes = [home for home in self._homes.values() if home.new]
        if not homes:
            return
        at = torch.cat([_places(home) for home in homes])
        numbers = [torch.tensor(list(home.new.values()), dtype=home.tensor.dtype).view(torch.int32) for home in homes]
        packed = send(torch.cat([at.view(torch.int32), *numbers]), self._words.device)
        self._words.index_copy_(0, packed[: 2 * len(at)].view(torch.int64), packed[2 * len(at) :])
        for home in homes:
            home.new.clear()


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize // 4


def _places(home: Home) -> Tensor:
    """The words of its new numbers: places 3 and 5 of 64-bit numbers from word 10 on -> 16, 17, 20, 21."""
    width = home.tensor.dtype.itemsize // 4
    first = home.first + width * torch.tensor(list(home.new), dtype=torch.int64)
    return (first[:, None] + torch.arange(width)).flatten()


IDLE = 0  # the slot of no sequence, for the idle places of a batch
MOST_ENDS = 8  # tokens that may end an output

LENGTH, MAX_LENGTH, RUNNING, NUM_DRAFT, REJECTS, SEED, TOP_K = range(7)  # rows of `DeviceSlots.whole`


class Tables:
    """Which pages of one model's arena hold the sequence in each slot: `[slots, width + 1]`.

    Where a sequence has no page there is `spare_page`, which belongs to none and receives what is written beyond.
    The last column is always spare, as that of position -1.
    """

    def __init__(self, slate: Slate, name: str, spare_page: int) -> None:
        self.pages, self.spare_page = slate[name].fill_(spare_page), spare_page
        self._slate, self._name, self._entered = slate, name, [0] * len(self.pages)

    @property
    def width(self) -> int:
        """Pages that a sequence may have."""
        return self.pages.shape[1] - 1

    def enter(self, slot: int, pages: Seq[int]) -> None:
        """Note what is new of a sequence's page table."""
        first = self._entered[slot]
        assert len(pages) <= self.width, "more pages than the longest sequence has"
        if len(pages) > first:
            self._slate.write(self._name, slot * self.pages.shape[1] + first, *pages[first:])
            self._entered[slot] = len(pages)

    def clear(self, slot: int) -> None:
        """Another sequence stands here from now on. The pages of the one before may have been given away."""
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
        self._slate = Slate(
            {
                "whole": (int64, (7, self._columns)), "ends": (int64, (size, MOST_ENDS)),
                "top_p": (torch.float64, (size,)), "min_p": (torch.float64, (size,)),
                "temperature": (torch.float32, (size,)), "target": pages, "draft": pages,
            },
            device,
        )  # fmt: skip
        self.target, self.draft = (
            Tables(self._slate, name, spare) for name, spare in zip(("target", "draft"), spare_pages, strict=True)
        )
        self.whole = self._slate["whole"]  # [7, columns]
        for row, value in ((LENGTH, 1), (MAX_LENGTH, 1), (TOP_K, vocab)):
            self.whole[row].fill_(value)
        self.tracks = Tracks(
            tokens=torch.zeros((size, longest), dtype=int64, device=device),
            length=self.whole[LENGTH],
            max_length=self.whole[MAX_LENGTH],
            ends=self._slate["ends"].fill_(-1),
            running=self.whole[RUNNING],
        )
        self.temperature, self.min_p = self._slate["temperature"], self._slate["min_p"]
        self.top_p = self._slate["top_p"].fill_(1)

    def place(
        self, slot: int, tokens: Seq[int], max_length: int, ends: Seq[int], sampling: SamplingParams, seed: int, *,
        num_draft: int = 0, rejects: bool = False,
    ) -> None:  # fmt: skip
        """Fill a slot, all but its pages. Its tokens go up at once, the rest with `send`. `rejects`: the rule is so."""
        self.target.clear(slot)
        self.draft.clear(slot)
        new = send(torch.tensor(tokens, dtype=torch.int64), self.tracks.tokens.device)
        self.tracks.tokens[slot, : len(new)].copy_(new)
        self._slate.write("ends", slot * MOST_ENDS, *ends, *[-1] * (MOST_ENDS - len(ends)))
        whole = {
            LENGTH: len(tokens), MAX_LENGTH: max_length, NUM_DRAFT: num_draft, REJECTS: int(rejects), RUNNING: 1,
            TOP_K: min(sampling.top_k or self.vocab, self.vocab), SEED: signed(seed),
        }  # fmt: skip
        for row, value in whole.items():
            self._slate.write("whole", row * self._columns + slot, value)
        for name in ("temperature", "min_p"):
            self._slate.write(name, slot, getattr(sampling, name))
        self._slate.write("top_p", slot, sampling.least_mass)

    def set_num_draft(self, slot: int, num_draft: int) -> None:
        """Drafts that this sequence takes of each round's K."""
        self._slate.write("whole", NUM_DRAFT * self._columns + slot, num_draft)

    def send(self) -> None:
        """Bring up what has changed since the last time. A round that is launched before it reads what was."""
        self._slate.send()
