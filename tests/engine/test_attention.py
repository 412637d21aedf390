"""SDPA on views against the reference, and the reference against the formula on whole matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pilotfish.engine.attention import choose, native, paged, reference, registry, sdpa
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels.reference import round_heads
from pilotfish.engine.kv.arena import floats_of
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.machine.threads import exactly


def _problem(seed: int, lens: list[tuple[int, int]], page: int, kv_heads: int, group: int, dim: int, longest: int = 64):
    """Random queries over an arena whose unused rows hold garbage; `lens` are (fed now, fed before)."""
    generator = torch.Generator().manual_seed(seed)
    per_sequence = -(-longest // page)
    order = torch.randperm(per_sequence * len(lens), generator=generator).tolist()
    tables = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(len(lens))]
    feeds = [Feed([0] * now, before, table) for (now, before), table in zip(lens, tables, strict=True)]
    batch = RaggedBatch.of(feeds, page, torch.device("cpu"))
    query = torch.randn(sum(now for now, _ in lens), kv_heads * group, dim, generator=generator)
    rows = per_sequence * len(lens) * page
    k = torch.randn(rows, kv_heads, dim, generator=generator)
    v = torch.randn(rows, kv_heads, dim, generator=generator)
    return batch, query, k, v


LENS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=5)
WINDOW = st.one_of(st.none(), st.integers(1, 20))
SOFTCAP = st.sampled_from([None, 5.0])


@settings(max_examples=15)
@given(st.integers(0, 1000), LENS, st.sampled_from([1, 3, 16]), WINDOW, SOFTCAP)
def test_reference_equals_the_formula(
    seed: int, lens: list[tuple[int, int]], page: int, window: int | None, softcap: float | None
) -> None:
    """One head and one row at a time, no tensor tricks."""
    batch, query, k, v = _problem(seed, lens, page, 2, 2, 8)
    got = reference.attend(query, k, v, batch, AttentionSpec(0.4, window, softcap=softcap))
    for i, (now, before) in enumerate(lens):
        for t in range(now):
            position, row = before + t, batch.cu_seqlens[i] + t
            oldest = 0 if window is None else max(0, position - window + 1)
            table = batch.page_tables[i]
            seen = [table[p // page] * page + p % page for p in range(oldest, position + 1)]
            for head in range(4):
                scores = torch.stack([query[row, head] @ k[r, head // 2] for r in seen]) * 0.4
                scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
                want = scores.softmax(0) @ torch.stack([v[r, head // 2] for r in seen])
                assert torch.allclose(got[row, head], want, atol=2e-5)


def _moved(k: torch.Tensor, batch: RaggedBatch, i: int, page: int) -> tuple[torch.Tensor, list[int]]:
    """Sequence i alone in an arena of another page size, its pages in reverse order, all else not a number."""
    pages = -(-batch.kv_lens[i] // page)
    table = list(range(pages))[::-1]
    arena = torch.full((pages * page, *k.shape[1:]), float("nan"))
    for position, row in enumerate(reference.arena_rows(batch, i, k.device).tolist()):
        arena[table[position // page] * page + position % page] = k[row]
    return arena, table


@settings(max_examples=8)
@given(st.integers(0, 1000), LENS, st.sampled_from([4, 16, 200]), WINDOW, SOFTCAP)
@pytest.mark.parametrize("dim", [7, 8, 20, 48])
def test_fixed_gives_a_query_the_same_bits_everywhere(
    dim: int, seed: int, lens: list[tuple[int, int]], page: int, window: int | None, softcap: float | None
) -> None:
    """One row alone, of one sequence, in other pages, beside rows that are not a number: nothing may show."""
    lens = [(now, before + 60 * (i % 2)) for i, (now, before) in enumerate(lens)]
    batch, query, k, v = _problem(seed, lens, 16, 2, 3, dim, longest=192)
    attend = choose("fixed", torch.device("cpu"))
    together = attend(query, k, v, batch, AttentionSpec(0.4, window, softcap=softcap))
    for i, (now, before) in enumerate(lens):
        (my_k, table), (my_v, _) = _moved(k, batch, i, page), _moved(v, batch, i, page)
        for t in {0, now - 1, now // 2}:
            alone = RaggedBatch.of([Feed([0], before + t, table)], page, torch.device("cpu"))
            row = batch.cu_seqlens[i] + t
            got = attend(query[row : row + 1], my_k, my_v, alone, AttentionSpec(0.4, window, softcap=softcap))
            assert torch.equal(got[0], together[row])


SHAPES = st.sampled_from([(1, 3, 8), (3, 1, 20), (2, 4, 20), (2, 2, 7)])  # key heads, queries of each, head size
KINDS = st.sampled_from(["floats", "int8", "latent"])


@settings(max_examples=15)
@given(st.integers(0, 1000), LENS, st.sampled_from([1, 3, 16, 64]), SHAPES, WINDOW, SOFTCAP, KINDS)
@example(0, [(1, 64), (1, 4)], 16, (2, 2, 7), None, None, "floats")  # the newest key of each begins a block
@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend_rows, sdpa.attend])
def test_each_equals_the_reference_in_floats(
    attend: registry.Attend, seed: int, lens: list[tuple[int, int]], page: int, shape: tuple[int, int, int],
    window: int | None, softcap: float | None, kind: str,
) -> None:  # fmt: skip
    """Also of keys and values in int8, which mean their floats, and where values are a part of the keys."""
    lens = [(now, before + 60 * (i % 2)) for i, (now, before) in enumerate(lens)]  # some in two blocks
    kv_heads, group, dim = shape
    dim -= dim % 4 * (kind != "floats")  # a scale is read as four of the bytes
    batch, query, k, v = _problem(seed, lens, page, 1 if kind == "latent" else kv_heads, group, dim, longest=192)
    if kind != "floats":
        k, v = round_heads(k), round_heads(v[..., :4])
    v = k[..., : v.shape[2]] if kind == "latent" else v
    spec = AttentionSpec(0.3, window, softcap=softcap, sinks=None if kind == "floats" else query[0, :, 0])
    want = reference.attend(query, floats_of(k, torch.float32), floats_of(v, torch.float32), batch, spec)
    assert torch.allclose(attend(query, k, v, batch, spec), want, atol=2e-5)


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert choose("sdpa", cpu) is sdpa.attend
    assert choose("reference", cpu) is reference.attend
    assert choose("auto", meta) is sdpa.attend
    assert choose("auto", meta, row_wise=True) is sdpa.attend_rows
    monkeypatch.setattr(registry, "library", lambda: object())
    for row_wise, otherwise in ((False, sdpa.attend), (True, sdpa.attend_rows)):
        chosen = choose("auto", cpu, row_wise=row_wise)
        assert (chosen.func, chosen.keywords) == (native.attend, {"otherwise": otherwise})
    assert choose("fixed", cpu).keywords == {"otherwise": sdpa.attend_fixed}
    monkeypatch.setattr(registry, "library", lambda: None)
    assert choose("auto", cpu) is sdpa.attend
    assert choose("fixed", cpu) is sdpa.attend_fixed
    monkeypatch.setattr(registry, "has_triton", lambda: True)
    monkeypatch.setattr(registry, "is_interpreted", lambda: False)
    assert choose("auto", torch.device("cuda")) is paged.attend
    assert choose("sdpa", torch.device("cuda")) is sdpa.attend
    with pytest.raises(ModelError, match="attention is triton, which requires a CUDA device"):
        choose("triton", cpu)
    monkeypatch.setattr(registry, "has_triton", lambda: False)
    assert choose("auto", torch.device("cuda")) is sdpa.attend
    with pytest.raises(ModelError, match="attention is native, which requires a CPU and the C kernels"):
        choose("native", cpu)


@pytest.mark.parametrize("dim", [7, 80, 128])
@pytest.mark.parametrize("attend", [sdpa.attend_fixed, choose("fixed", torch.device("cpu"))])
def test_fixed_has_the_same_bits_on_any_number_of_threads(attend: registry.Attend, dim: int) -> None:
    """Also over many keys, which torch's own attention divides among its threads."""
    batch, query, k, v = _problem(1, [(2, 700), (1, 63)], 16, 2, 3, dim, longest=704)
    found = []
    for threads in (1, 2, 3, 8):
        with exactly(threads):
            found.append(attend(query, k, v, batch, AttentionSpec(0.1)))
    assert all(torch.equal(each, found[0]) for each in found)
