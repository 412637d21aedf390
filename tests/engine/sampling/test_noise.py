"""The counter-based noise: right bits, right law, and no dependence where there must be none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pilotfish.engine.sampling import noise
from pilotfish.engine.sampling.noise import Stream

ONES = 0xFFFFFFFF
KNOWN = [  # Random123's known answers for philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    got = noise.philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in got) == words


def _rows(seeds: list[int], positions: list[int], stream: Stream = Stream.COUPLED) -> tuple[torch.Tensor, ...]:
    return torch.tensor(seeds), torch.tensor(positions), torch.full((len(seeds),), int(stream))


@settings(max_examples=40)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(2, 300), st.sampled_from(list(Stream)))
def test_a_tokens_noise_is_its_own(seed: int, position: int, vocab: int, stream: Stream) -> None:
    """The same for any vocabulary size, any company of rows, and when only some tokens are asked for."""
    row = _rows([seed], [position], stream)
    whole = noise.gumbel(*row, vocab)
    assert torch.equal(noise.gumbel(*row, vocab // 2), whole[:, : vocab // 2])
    some = torch.tensor([[vocab - 1, 0, vocab // 2]])
    assert torch.equal(noise.gumbel_at(*row, some), whole.gather(1, some))
    company = _rows([1, 2, 3, 4, seed, 5], [9, 9, 9, 9, position, 9], stream)
    assert torch.equal(noise.gumbel(*company, vocab)[4:5], whole)


@settings(max_examples=40)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    position=st.integers(0, 2**40),
    vocab=st.integers(1, 300),
    stream=st.sampled_from(list(Stream)),
    tokens=st.lists(st.integers(0, 2**32), min_size=1, max_size=9),
)
def test_our_c_makes_the_bits_of_torch(seeds: list[int], position: int, vocab: int, stream: Stream, tokens: list[int]):
    """Where there is a compiler; else torch's are all there are."""
    rows = _rows(seeds, [position + 3 * i for i in range(len(seeds))], stream)
    some = torch.tensor([tokens] * len(seeds))
    made = noise.gumbel(*rows, vocab), noise.gumbel_at(*rows, some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_runs_in_c", lambda _: False)
        by_torch = noise.gumbel(*rows, vocab), noise.gumbel_at(*rows, some)
    assert all(map(torch.equal, made, by_torch))


def assert_drawn(numbers: Tensor, law: str) -> None:
    """Kolmogorov's and Smirnov's test."""
    from scipy import stats  # takes a second and a half, which only this process pays

    assert stats.kstest(numbers.double().numpy(), law).pvalue > 1e-3


def test_standard_gumbel() -> None:
    drawn = noise.gumbel(*_rows(list(range(100)), [7] * 100), 1000).flatten()
    assert torch.isfinite(drawn).all()
    assert_drawn(drawn, "gumbel_r")


def test_the_tail_is_fine() -> None:
    """The winner of an argmax lives where u is near 1: the largest of a million must be Gumbel too."""
    largest = noise.gumbel(*_rows(list(range(2000)), [0] * 2000), 1000).amax(1) - torch.log(torch.tensor(1000.0))
    assert_drawn(largest, "gumbel_r")


def test_uniform() -> None:
    seed, position = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    drawn = noise.uniform(seed, position, Stream.ACCEPT)
    assert ((drawn > 0) & (drawn < 1)).all()
    assert_drawn(drawn, "uniform")


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (_rows([5], [9]), _rows([6], [9])),
        (_rows([5], [9]), _rows([5], [10])),
        (_rows([5], [9]), _rows([5 + 2**32], [9])),
        (_rows([5], [9], Stream.COUPLED), _rows([5], [9], Stream.DRAFT)),
        (_rows([5], [9], Stream.ACCEPT), _rows([5], [9], Stream.RESAMPLE)),
    ],
    ids=["seed", "position", "high seed bits", "stream", "accept and resample"],
)
def test_neighbours_are_independent(here: tuple[torch.Tensor, ...], there: tuple[torch.Tensor, ...]) -> None:
    a, b = noise.gumbel(*here, 20_000)[0], noise.gumbel(*there, 20_000)[0]
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.03
    neighbours = torch.corrcoef(torch.stack([a[:-1], a[1:]]))[0, 1]
    assert abs(neighbours) < 0.03
