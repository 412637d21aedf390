"""However a text is cut into passes, and whatever is drafted and taken back: its rows have the bits of one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.kv.states import StatePool
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.native import library
from pilotfish.engine.native.recurrent import scans
from pilotfish.engine.recurrent import native, rules
from pilotfish.engine.recurrent.arena import PartSlots, ScanPlan, StatePart
from pilotfish.engine.types import EMPTY_STATE, KVCursor, StateSpan

PAGE, LOG, LENGTH, TOKENS, DEVICE = 4, 4, 14, 7, torch.device("cpu")
HEADS, GROUPS = 4, 2
NAMES = ("conv", "gated_delta", "kimi_delta", "mamba2", "mamba1")
# Numbers of a key and of a value: less than a vector of C's, and whole blocks of vectors with some more behind them.
SIZES = {"small": (3, 5), "blocks": (17, 68)}
needs_c = pytest.mark.skipif(library() is None, reason="no C compiler")


class Rule(NamedTuple):
    """A rule, the shape of a state, those of the inputs of a token, and which of these are logged."""

    state: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    logged: slice
    run: Callable[..., Tensor]


def rule_of(name: str, keys: int, values: int) -> Rule:
    draw = torch.Generator().manual_seed(1)
    weight, bias, decay = (torch.randn(*shape, generator=draw) for shape in ((values, 4), (values,), (values, keys)))
    few, key, value = (HEADS,), (HEADS, keys), (HEADS, values)
    state, pair = (HEADS, keys, values), ((GROUPS, keys), (GROUPS, keys))
    return {
        "conv": Rule(
            (values, 3), ((values,),), slice(1), lambda how, slots, x: how.conv(slots, x, weight, bias, "silu")
        ),
        "gated_delta": Rule(
            state, (key, key, value, few, few), slice(1, 4),
            lambda how, slots, q, k, v, g, beta: how.delta(slots, q, k, v, -g.abs(), beta),
        ),
        "kimi_delta": Rule(
            state, (key, key, value, key, few), slice(1, 4),
            lambda how, slots, q, k, v, g, beta: how.delta(slots, q, k, v, -g.abs(), beta),
        ),
        "mamba2": Rule(
            state, (value, few, *pair), slice(3),
            lambda how, slots, x, dt, b, c: how.mamba2(slots, x, dt.abs(), -bias[:HEADS].abs(), b, c, bias[:HEADS]),
        ),
        "mamba1": Rule(
            (keys, values), ((values,), (values,), (keys,), (keys,)), slice(3),
            lambda how, slots, x, dt, b, c: how.mamba1(slots, x, dt.abs(), -decay.abs(), b, c, bias),
        ),
    }[name]  # fmt: skip


class Layer:
    """A layer with one rule, whose inputs hang on the token alone."""

    def __init__(
        self, name: str, how: ModuleType, sizes: str, num_slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.how, (shape, inputs, logged, self.rule) = how, rule_of(name, *SIZES[sizes])
        generator = torch.Generator().manual_seed(0)
        self.table = [(torch.rand(TOKENS, *one, generator=generator) - 0.5).to(dtype) for one in inputs]
        width = sum(math.prod(one) for one in inputs[logged])
        part = StatePart(shape, width, dtype if name == "conv" else torch.float32)
        self.tensors = part.tensors(num_slots, LOG, DEVICE)

    def run(self, feeds: list[Feed]) -> list[Tensor]:
        """The rows of each feed."""
        batch = RaggedBatch.of(feeds, PAGE, DEVICE)
        slots = PartSlots(*self.tensors, ScanPlan.of(batch, LOG))
        out = self.rule(self.how, slots, *(column[batch.input_ids] for column in self.table))
        return list(out.split([len(feed.tokens) for feed in feeds]))


def in_one_pass(name: str, how: ModuleType, sizes: str, text: list[int]) -> Tensor:
    """Its rows, by several threads."""
    feed = Feed(text, 0, range(9), state=StateSpan(EMPTY_STATE, 0, 1, len(text)))
    with exactly(3):
        (rows,) = Layer(name, how, sizes, 2).run([feed])
    return rows


class Written:
    """A text on its way through a layer: what is known of it, and the rows of its tokens so far."""

    def __init__(self, text: list[int], known: int, pool: StatePool, layer: Layer) -> None:
        self.text, self.known, self.layer = text, known, layer
        self.rows = torch.empty(0)
        self.cursor = KVCursor()
        assert pool.open(self.cursor)

    def feed(self, chunk: int, num_draft: int, num_right: int) -> Feed | None:
        """What the next pass feeds: up to `chunk` known tokens, and drafts once all known ones are fed."""
        start = self.cursor.kv_len
        stop = min(start + chunk, self.known)
        if start == len(self.text):
            return None
        drafts = self.text[stop : stop + num_draft] if stop == self.known else []
        self.num_kept = min(num_right, len(drafts))
        wrong = [(token + 1) % TOKENS for token in drafts[self.num_kept :]]
        tokens = [*self.text[start : stop + self.num_kept], *wrong]
        return Feed(tokens, start, range(9), state=self.cursor.span(start, start + len(tokens), stop, PAGE))

    def commit(self, rows: Tensor, feed: Feed) -> None:
        """Keep the rows of known tokens and of right drafts; one more token becomes known after a verification."""
        self.cursor.advance(feed.kv_len)
        end = min(feed.kv_len, self.known) + self.num_kept
        self.rows = torch.cat([self.rows, rows[: end - feed.start]])
        self.known = min(len(self.text), max(self.known, end + 1))
        self.cursor.kv_len = end


# A turn of a sequence: whether it is in the pass, how many known tokens it is fed, drafts, and how many are right.
turn = st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, LOG), st.integers(0, LOG))
texts = st.lists(st.integers(0, TOKENS - 1), min_size=LENGTH, max_size=LENGTH)
schedules = st.lists(st.tuples(turn, turn), min_size=4, max_size=14)


@pytest.mark.parametrize(
    ("how", "sizes"),
    [pytest.param(rules, "small", id="torch"), *(pytest.param(native, s, id=f"C-{s}", marks=needs_c) for s in SIZES)],
)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(both=st.tuples(texts, texts), schedule=schedules, prompt=st.integers(1, 9))
def test_any_schedule_has_the_bits_of_one_pass(
    name: str,
    how: ModuleType,
    sizes: str,
    both: tuple[list[int], list[int]],
    schedule: list[tuple[tuple[bool, int, int, int], ...]],
    prompt: int,
) -> None:
    pool, layer = StatePool(7, LOG, snapshots=True), Layer(name, how, sizes, 7)
    writers = [Written(text, prompt, pool, layer) for text in both]
    for turns in schedule:
        planned = [
            (one, one.feed(*size)) for one, (takes_part, *size) in zip(writers, turns, strict=True) if takes_part
        ]
        fed = [(one, feed) for one, feed in planned if feed is not None]
        for (one, feed), rows in zip(fed, layer.run([feed for _, feed in fed]) if fed else [], strict=True):
            one.commit(rows, feed)
        pool.check_invariants(one.cursor for one in writers)
    for one in writers:
        want = in_one_pass(name, how, sizes, one.text)[: len(one.rows)]
        assert len(one.rows) == one.cursor.kv_len
        assert torch.equal(one.rows, want.reshape(one.rows.shape))


PASSES = (
    (
        (0, 4, StateSpan(1, 0, 3, 1)),  # three drafts
        (0, 3, StateSpan(7, 0, 7, 0)),  # nothing is settled
    ),
    (
        (3, 7, StateSpan(3, 1, 4, 4, (5, 2))),  # goes on after two logged rows, and drafts: its state is written twice
        (0, 3, StateSpan(EMPTY_STATE, 0, 6, 3)),
        (2, 4, StateSpan(7, 0, 7, 0)),  # nothing is settled here either, after two logged rows
    ),
)


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_c_computes_what_torch_does(name: str, sizes: str, dtype: torch.dtype) -> None:
    """And writes no other slot and no other log."""
    ours, theirs = (Layer(name, how, sizes, 9, dtype) for how in (native, rules))
    ours.tensors[0][EMPTY_STATE + 1 :].normal_()
    before, theirs.tensors = ours.tensors[0].clone(), tuple(x.clone() for x in ours.tensors)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for parts in PASSES:
        feeds = [Feed([i % TOKENS for i in range(start, stop)], start, range(9), state=s) for start, stop, s in parts]
        for got, want in zip((*ours.run(feeds), *ours.tensors), (*theirs.run(feeds), *theirs.tensors), strict=True):
            torch.testing.assert_close(got, want, **near)
    written = {3, 4, 5, 6}
    assert all(torch.equal(ours.tensors[0][i], before[i]) for i in range(9) if i not in written)
    assert {i for i in range(9) if ours.tensors[1][i].any()} == {3, 4, 7}


def test_c_says_what_it_cannot_run() -> None:
    assert scans(torch.zeros(1, 8), 16) == (library() is not None)
    assert not scans(torch.zeros(1, 8), 1 << 20)
    assert not scans(torch.zeros(1, 8, dtype=torch.float16), 16)
