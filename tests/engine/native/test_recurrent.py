"""Recurrent layers in C: what `engine/recurrent/rules.py` computes, and the same bits however rows come together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.kv.batch import Feed, RaggedBatch
from engine.machine.threads import exactly
from engine.native import library
from engine.recurrent import native, rules
from engine.recurrent.parts import PartSlots, StatePart
from engine.recurrent.plan import ScanPlan
from engine.types import EMPTY_STATE, StateSpan

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

SLOTS, LOG, WHOLE = 9, 4, 13


def plan_of(*parts: tuple[int, int, StateSpan]) -> ScanPlan:
    """The plan of a pass; parts are (start, stop, span) of each sequence."""
    feeds = [Feed([0] * (stop - start), start, [0], state=span) for start, stop, span in parts]
    return ScanPlan.of(RaggedBatch.of(feeds, 64, torch.device("cpu")), LOG)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


class Case:
    """A rule with inputs for `rows` rows, and an arena of states."""

    def __init__(self, name: str, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.name, self.dtype = name, dtype
        make: Callable[..., None] = getattr(self, f"_{name}")
        make(*sizes)
        logged = {"conv": slice(1), "gated_delta": slice(1, 4), "kimi_delta": slice(1, 4)}.get(name, slice(3))
        kept = self.dtype if name == "conv" else torch.float32
        self.part = StatePart.of(self.shape, kept, *self.rows[logged])

    def _conv(self, channels: int, size: int) -> None:
        self.shape: tuple[int, ...] = (channels, size - 1)
        self.rows: tuple[Tensor, ...] = (drawn(WHOLE, channels, dtype=self.dtype),)
        self.rest: tuple[object, ...] = (drawn(channels, size, dtype=self.dtype), drawn(channels), "silu")

    def _gated_delta(self, heads: int, keys: int, values: int) -> None:
        self.shape, self.rest = (heads, keys, values), ()
        key = torch.nn.functional.normalize(drawn(WHOLE, heads, keys), dim=-1).to(self.dtype)
        value = drawn(WHOLE, heads, values, dtype=self.dtype)
        decay = -torch.rand(WHOLE, heads)
        self.rows = drawn(WHOLE, heads, keys, dtype=self.dtype), key, value, decay, torch.rand(WHOLE, heads)

    def _kimi_delta(self, heads: int, keys: int, values: int) -> None:
        self._gated_delta(heads, keys, values)
        self.rows = *self.rows[:3], -torch.rand(WHOLE, heads, keys), self.rows[4]

    def _mamba2(self, heads: int, groups: int, width: int, depth: int) -> None:
        self.shape, self.rest = (heads, depth, width), (drawn(heads),)
        pair = (drawn(WHOLE, groups, depth, dtype=self.dtype) for _ in "bc")
        self.rows = drawn(WHOLE, heads, width, dtype=self.dtype), torch.rand(WHOLE, heads), *pair
        self.decay: Tensor = -torch.rand(heads) * 3

    def _mamba1(self, width: int, depth: int) -> None:
        self.shape, self.rest = (depth, width), (drawn(width),)
        pair = (drawn(WHOLE, depth, dtype=self.dtype) for _ in "bc")
        self.rows = drawn(WHOLE, width, dtype=self.dtype), torch.rand(WHOLE, width), *pair
        self.decay = -torch.rand(width, depth) * 3

    def slots(self) -> tuple[Tensor, Tensor]:
        """Drawn states, but the empty one; nothing is logged."""
        states, log = self.part.tensors(SLOTS, LOG, torch.device("cpu"))
        states[EMPTY_STATE + 1 :].normal_()
        return states, log

    def run(self, module: object, slots: tuple[Tensor, Tensor], rows: list[int], plan: ScanPlan) -> Tensor:
        taken, held = [x[rows] for x in self.rows], PartSlots(*slots, plan)
        rule = getattr(module, self.name)
        if self.name in ("mamba1", "mamba2"):
            x, dt, b, c = taken
            return rule(held, x, dt, self.decay, b, c, *self.rest)
        return rule(held, *taken, *self.rest)


CASES = {
    "conv": ("conv", (48, 4)),
    "conv, odd": ("conv", (21, 3)),
    "delta": ("gated_delta", (3, 32, 64)),
    "delta, odd": ("gated_delta", (2, 17, 70)),
    "kimi": ("kimi_delta", (2, 16, 32)),
    "kimi, odd": ("kimi_delta", (2, 13, 9)),
    "mamba2": ("mamba2", (4, 2, 64, 32)),
    "mamba2, odd": ("mamba2", (3, 1, 70, 9)),
    "mamba1": ("mamba1", (96, 16)),
    "mamba1, odd": ("mamba1", (70, 5)),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def make(request: pytest.FixtureRequest) -> Callable[..., Case]:
    return partial(Case, *request.param)


DRAFTED = (
    (0, 4, StateSpan(1, 0, 3, 1)),  # three drafts
    (0, 3, StateSpan(7, 0, 7, 0)),  # nothing is settled
)
MIXED = (
    (3, 7, StateSpan(3, 1, 4, 4, (5, 2))),  # goes on after two logged rows, and drafts: its state is written twice
    (0, 3, StateSpan(EMPTY_STATE, 0, 6, 3)),
    (2, 4, StateSpan(7, 0, 7, 0)),  # nothing is settled here either, after two logged rows
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_what_the_reference_does(make: Callable[..., Case], dtype: torch.dtype) -> None:
    case = make(dtype)
    slots = case.slots()
    before = slots[0].clone()
    copy = slots[0].clone(), slots[1].clone()
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for plan in plan_of(*DRAFTED), plan_of(*MIXED):
        rows = list(range(plan.scans[-1].stop))
        out, want = case.run(native, slots, rows, plan), case.run(rules, copy, rows, plan)
        assert out.dtype == want.dtype == dtype
        for ours, theirs in ((out, want), *zip(slots, copy, strict=True)):
            torch.testing.assert_close(ours, theirs, **near)
    written = {3, 4, 5, 6}
    assert all(torch.equal(slots[0][i], before[i]) for i in range(SLOTS) if i not in written), "another slot changed"
    assert {i for i in range(SLOTS) if slots[1][i].any()} == {3, 4, 7}, "a log of another slot was written"


WHOLE_TEXT = (0, 10, StateSpan(EMPTY_STATE, 0, 1, 10))
IN_PARTS = (  # and how many of a part's rows are kept
    ((0, 1, StateSpan(EMPTY_STATE, 0, 2, 1)), 1),
    ((1, 6, StateSpan(2, 1, 3, 2)), 3),
    ((4, 6, StateSpan(3, 2, 3, 2)), 2),
    ((6, 10, StateSpan(3, 2, 2, 10)), 4),
)


def test_a_row_has_the_same_bits_however_it_comes(make: Callable[..., Case]) -> None:
    """Whole, in parts of which drafts are taken back, beside others, and on one thread."""
    case = make()
    slots = case.slots()
    whole = case.run(native, slots, list(range(10)), plan_of(WHOLE_TEXT))
    after = slots[0][1].clone()
    parts = []
    for (start, stop, span), kept in IN_PARTS:
        plan = plan_of((start, stop, span), (0, 3, StateSpan(EMPTY_STATE, 0, 8, 3)))
        rows = [*range(start, start + kept), *range(10, 10 + stop - start - kept), *range(10, 13)]
        parts.append(case.run(native, slots, rows, plan)[:kept])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(slots[0][2], after)
    with exactly(1):
        alone = case.run(native, slots, list(range(10)), plan_of(WHOLE_TEXT))
    assert torch.equal(alone, whole)
    assert torch.equal(slots[0][1], after)


def test_a_slot_can_be_written_while_it_is_read(make: Callable[..., Case]) -> None:
    case = make()
    slots = case.slots()
    apart = slots[0].clone(), slots[1].clone()
    there = case.run(native, apart, list(range(5)), plan_of((0, 5, StateSpan(3, 0, 4, 5))))
    here = case.run(native, slots, list(range(5)), plan_of((0, 5, StateSpan(3, 0, 3, 5))))
    assert torch.equal(here, there)
    assert torch.equal(slots[0][3], apart[0][4])


def test_says_what_it_cannot_run() -> None:
    assert native.fits(torch.zeros(1, 8), 16)
    assert not native.fits(torch.zeros(1, 8), 1 << 20)
    assert not native.fits(torch.zeros(1, 8, dtype=torch.float16), 16)
