"""Every pass has the same shape, and nobody but the padding notices."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import choose
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.model.fixed_shape import TILE, FixedShapeRunner, cut, wanted_rows
from engine.model.runner import ModelRunner, layout_of_model
from engine.model.tap import FINAL, Tap
from tests import fakes, zoo

VOCAB, PAGE, PAGES = 11, 4, 64
LENS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4)


def feeds_of(lens: list[tuple[int, int]]) -> list[Feed]:
    """New sequences of these lengths, each wanting logits for its last tokens."""
    tables = [range(10 * i, 10 * i + 10) for i in range(len(lens))]
    return [
        Feed([(3 * t + i) % VOCAB for t in range(n)], 0, table, min(wanted, n))
        for i, ((n, wanted), table) in enumerate(zip(lens, tables, strict=True))
    ]


def test_the_worked_example() -> None:
    tiles = list(cut([Feed([1, 2, 3], 5, [0]), Feed([4, 5, 6, 7, 8, 9], 0, [1], 2), Feed([10], 9, [2])], size=4))
    assert [[len(f.tokens) for f in tile] for tile in tiles] == [[3, 1], [4], [1, 1]]
    assert [[f.start for f in tile] for tile in tiles] == [[5, 0], [1], [5, 9]]
    assert [wanted_rows(tile) for tile in tiles] == [[2], [3], [0, 1]]


def test_a_tap_holds_the_rows_of_all_passes() -> None:
    """What heads draft from: the hidden state of each token of the batch, in order, without padding."""
    model = zoo.ours(zoo.reference("llama"))
    tap, layout = Tap(model), layout_of_model(model)
    arena = KVArena(layout, num_pages=PAGES, page_size=PAGE, device=model.device, spare_rows=TILE)
    inner = ModelRunner(model, arena, choose("reference", model.device))
    feeds = feeds_of([(3, 1), (20, 0), (17, 2)])
    inner.forward(feeds)
    whole = tap.read((FINAL,))
    FixedShapeRunner(inner, scratch=PAGES, tap=tap).forward(feeds)
    assert tap.read((FINAL,)).shape == (40, model.config.hidden_size)
    assert torch.allclose(tap.read((FINAL,)), whole, atol=1e-5)


@settings(max_examples=30)
@given(LENS)
def test_same_logits_in_passes_of_one_shape(lens: list[tuple[int, int]]) -> None:
    """The fake reads its context back from its arena: a tile that ran too early, or a wrong row, would show."""
    law = fakes.hashed_law(VOCAB)
    plain, inner = (fakes.TableModel(law, VOCAB, PAGES, PAGE) for _ in range(2))
    got = FixedShapeRunner(inner, scratch=PAGES - 1).forward(feeds_of(lens))
    assert torch.equal(got, plain.forward(feeds_of(lens)))
    for batch in inner.batches:
        assert sum(len(feed.tokens) for feed in batch) == TILE
        assert sum(feed.num_logits for feed in batch) in (0, TILE)
