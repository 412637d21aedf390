"""However a text is cut into passes, and whatever is drafted and taken back: its rows have the bits of one pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kv.batch import Feed, RaggedBatch
from engine.kv.states import StatePool
from engine.recurrent import native, rules
from engine.recurrent.parts import PartSlots, StatePart
from engine.recurrent.plan import ScanPlan
from engine.recurrent.registry import StateRules
from engine.types import EMPTY_STATE, KVCursor, StateSpan

PAGE, LOG, LENGTH, TOKENS, DEVICE = 4, 3, 14, 7, torch.device("cpu")
HEADS, KEYS, VALUES, GROUPS = 2, 3, 5, 1

# Of each rule: the shape of a state, those of the inputs of a token, which of these are logged, and how it is run.
Run = Callable[..., Tensor]
RULES: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]], slice, Run]] = {}


def _rule(name: str, state: tuple[int, ...], logged: slice, *inputs: tuple[int, ...]) -> Callable[[Run], Run]:
    def keep(run: Run) -> Run:
        RULES[name] = state, list(inputs), logged, run
        return run

    return keep


@_rule("conv", (VALUES, 3), slice(1), (VALUES,))
def _conv(how: StateRules, slots: PartSlots, x: Tensor) -> Tensor:
    return how.conv(slots, x, WEIGHT, BIAS, "silu")


_SHAPES = (HEADS, KEYS), (HEADS, KEYS), (HEADS, VALUES)


@_rule("gated_delta", (HEADS, KEYS, VALUES), slice(1, 4), *_SHAPES, (HEADS,), (HEADS,))
def _gated_delta(how: StateRules, slots: PartSlots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return how.gated_delta(slots, q, k, v, -g.abs(), beta)


@_rule("kimi_delta", (HEADS, KEYS, VALUES), slice(1, 4), *_SHAPES, (HEADS, KEYS), (HEADS,))
def _kimi_delta(how: StateRules, slots: PartSlots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return how.kimi_delta(slots, q, k, v, -g.abs(), beta)


@_rule("mamba2", (HEADS, KEYS, VALUES), slice(3), (HEADS, VALUES), (HEADS,), (GROUPS, KEYS), (GROUPS, KEYS))
def _mamba2(how: StateRules, slots: PartSlots, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return how.mamba2(slots, x, dt.abs(), -BIAS[:HEADS].abs(), b, c, BIAS[:HEADS])


@_rule("mamba1", (KEYS, VALUES), slice(3), (VALUES,), (VALUES,), (KEYS,), (KEYS,))
def _mamba1(how: StateRules, slots: PartSlots, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return how.mamba1(slots, x, dt.abs(), -WEIGHT[:, :KEYS].abs(), b, c, BIAS)


WEIGHT, BIAS = torch.randn(VALUES, 4), torch.randn(VALUES)


class Layer:
    """A layer with one rule, whose inputs hang on the token alone."""

    def __init__(self, name: str, how: StateRules, num_slots: int) -> None:
        self.how = how
        shape, inputs, logged, self.rule = RULES[name]
        generator = torch.Generator().manual_seed(0)
        self.table = [torch.randn(TOKENS, *shape, generator=generator) * 0.5 for shape in inputs]
        self.tensors = StatePart.of(shape, torch.float32, *self.table[logged]).tensors(num_slots, LOG, DEVICE)

    def run(self, feeds: list[Feed]) -> list[Tensor]:
        """The rows of each feed."""
        batch = RaggedBatch.of(feeds, PAGE, DEVICE)
        slots = PartSlots(*self.tensors, ScanPlan.of(batch, LOG))
        out = self.rule(self.how, slots, *(column[batch.input_ids] for column in self.table))
        return list(out.split([len(feed.tokens) for feed in feeds]))


def in_one_pass(name: str, how: StateRules, text: list[int]) -> Tensor:
    (rows,) = Layer(name, how, 2).run([Feed(text, 0, range(9), state=StateSpan(EMPTY_STATE, 0, 1, len(text)))])
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


@pytest.mark.parametrize("how", [rules, native], ids=["torch", "C"])
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20)
@given(both=st.tuples(texts, texts), schedule=schedules, prompt=st.integers(1, 9))
def test_any_schedule_has_the_bits_of_one_pass(
    name: str,
    how: StateRules,
    both: tuple[list[int], list[int]],
    schedule: list[tuple[tuple[bool, int, int, int], ...]],
    prompt: int,
) -> None:
    pool, layer = StatePool(7, LOG, snapshots=True), Layer(name, how, 7)
    writers = [Written(text, prompt, pool, layer) for text in both]
    for turns in schedule:
        planned = [(one, one.feed(*how)) for one, (takes_part, *how) in zip(writers, turns, strict=True) if takes_part]
        fed = [(one, feed) for one, feed in planned if feed is not None]
        for (one, feed), rows in zip(fed, layer.run([feed for _, feed in fed]) if fed else [], strict=True):
            one.commit(rows, feed)
        pool.check_invariants(one.cursor for one in writers)
    for one in writers:
        assert len(one.rows) == one.cursor.kv_len
        assert torch.equal(one.rows, in_one_pass(name, how, one.text)[: len(one.rows)].reshape(one.rows.shape))
