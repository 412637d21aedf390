"""The worked example of `RaggedBatch`, and its law."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.kv.batch import Feed, RaggedBatch

CPU = torch.device("cpu")


def test_the_docstring_example() -> None:
    feeds = [
        Feed([11, 12, 13], start=5, page_table=[0, 1], num_logits=3),
        Feed([21, 22, 23, 24], start=0, page_table=[4]),
        Feed([31], start=9, page_table=[7, 6, 5]),
    ]
    batch = RaggedBatch.of(feeds, page_size=4, device=CPU)
    assert batch.input_ids.tolist() == [11, 12, 13, 21, 22, 23, 24, 31]
    assert batch.cu_seqlens == (0, 3, 7, 8)
    assert batch.positions.tolist() == [5, 6, 7, 0, 1, 2, 3, 9]
    assert batch.kv_lens == (8, 4, 10)
    assert batch.logit_rows.tolist() == [0, 1, 2, 6, 7]
    assert batch.kv_rows.tolist() == [5, 6, 7, 16, 17, 18, 19, 21]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6), st.integers(1, 8))
def test_every_token_has_a_row_of_its_own(shape: list[tuple[int, int]], page_size: int) -> None:
    feeds, pages = [], iter(range(1000))
    for length, start in shape:
        table = [next(pages) for _ in range(-(-(start + length) // page_size))]
        feeds.append(Feed(list(range(length)), start, table, num_logits=0))
    batch = RaggedBatch.of(feeds, page_size, CPU)
    assert len(set(batch.kv_rows.tolist())) == sum(length for length, _ in shape)
    assert len(batch.logit_rows) == 0
