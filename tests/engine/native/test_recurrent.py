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

    def states(self) -> Tensor:
        kept = self.dtype if self.name == "conv" else torch.float32
        states = torch.randn(SLOTS, *self.shape).to(kept)
        states[EMPTY_STATE] = 0
        return states

    def run(self, module: object, states: Tensor, rows: list[int], plan: ScanPlan) -> Tensor:
        taken = [x[rows] for x in self.rows]
        rule = getattr(module, self.name)
        if self.name in ("mamba1", "mamba2"):
            x, dt, b, c = taken
            return rule(states, x, dt, self.decay, b, c, *self.rest, plan)
        return rule(states, *taken, *self.rest, plan)


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


MIXED = (
    (2, 7, StateSpan(3, 0, 4, 4, (5, 2))),  # goes on after two logged rows, and drafts: its state is written twice
    (0, 3, StateSpan(EMPTY_STATE, 0, 6, 3)),
    (0, 3, StateSpan(7, 0, 7, 0)),  # nothing is settled
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_what_the_reference_does(make: Callable[..., Case], dtype: torch.dtype) -> None:
    case, plan = make(dtype), plan_of(*MIXED)
    rows = list(range(plan.cu_rows[-1]))
    states = case.states()
    ours, theirs = states.clone(), states.clone()
    out, want = case.run(native, ours, rows, plan), case.run(rules, theirs, rows, plan)
    assert out.dtype == want.dtype == dtype
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, want, **near)
    torch.testing.assert_close(ours, theirs, **near)
    written = {4, 5, 6}
    assert all(torch.equal(ours[i], states[i]) for i in range(SLOTS) if i not in written), "a slot of another changed"


def test_a_row_has_the_same_bits_however_it_comes(make: Callable[..., Case]) -> None:
    """Whole, in parts, beside others, and on one thread."""
    case = make()
    states = case.states()
    whole = case.run(native, states, list(range(10)), plan_of((0, 10, StateSpan(EMPTY_STATE, 0, 1, 10))))
    after = states[1].clone()
    parts = []
    for start, stop, read, write in ((0, 1, EMPTY_STATE, 2), (1, 6, 2, 3), (6, 10, 3, 2)):
        plan = plan_of((start, stop, StateSpan(read, start, write, stop)), (0, 3, StateSpan(EMPTY_STATE, 0, 8, 3)))
        rows = [*range(start, stop), *range(10, 13)]
        parts.append(case.run(native, states, rows, plan)[: stop - start])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states[2], after)
    with exactly(1):
        alone = case.run(native, states, list(range(10)), plan_of((0, 10, StateSpan(EMPTY_STATE, 0, 1, 10))))
    assert torch.equal(alone, whole)
    assert torch.equal(states[1], after)


def test_a_slot_can_be_written_while_it_is_read(make: Callable[..., Case]) -> None:
    case = make()
    states = case.states()
    apart = states.clone()
    there = case.run(native, apart, list(range(5)), plan_of((0, 5, StateSpan(3, 0, 4, 5))))
    here = case.run(native, states, list(range(5)), plan_of((0, 5, StateSpan(3, 0, 3, 5))))
    assert torch.equal(here, there)
    assert torch.equal(states[3], apart[4])


def test_says_what_it_cannot_run() -> None:
    assert native.fits(torch.zeros(1, 8), 16)
    assert not native.fits(torch.zeros(1, 8), 1 << 20)
    assert not native.fits(torch.zeros(1, 8, dtype=torch.float16), 16)
