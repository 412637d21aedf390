"""Accept and commit against lists of integers: the kernel, and the plain torch that says what it means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.kernels import reference, sampling
from pilotfish.engine.kernels.args import FULL, RUNNING, STOPPED, UNSOUND, Tracks
from tests.interpreting import DEVICE

LONGEST = 12
TOKENS = st.integers(0, 3)  # few, so that drafts are often right and ends often met


@st.composite
def rounds(draw):
    """(drawn, drafts, sound rows, tokens so far, longest length, ends, running) of some sequences with one K."""
    k = draw(st.integers(0, 4))
    return [
        (
            draw(st.lists(TOKENS, min_size=k + 1, max_size=k + 1)),
            draw(st.lists(st.integers(-1, 3), min_size=k, max_size=k)),
            draw(st.sampled_from([k + 1, k + 1, k + 1, *range(k + 1)])),
            tokens := draw(st.lists(TOKENS, min_size=1, max_size=LONGEST - 1)),
            draw(st.integers(len(tokens) + 1, LONGEST)),
            draw(st.lists(TOKENS, max_size=2)),
            draw(st.sampled_from([1, 1, 1, 0])),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


def by_hand(drawn, drafts, num_sound, tokens, longest, ends, running):
    """One token after the other: (fresh tokens, accepted drafts, why it ended)."""
    fresh, accepted = [], 0
    for i in range(len(drawn) if running else 0):
        if i == num_sound:
            return fresh, accepted, UNSOUND
        fresh.append(drawn[i])
        kept = i < len(drafts) and drafts[i] == drawn[i]
        accepted += kept
        if drawn[i] in ends:
            return fresh, accepted, STOPPED
        if len(tokens) + len(fresh) == longest:
            return fresh, accepted, FULL
        if not kept:
            break
    return fresh, accepted, RUNNING


def tracks_of(batch) -> Tracks:
    size = len(batch) + 2
    tracks = Tracks(
        torch.full((size, LONGEST), 9, device=DEVICE),
        torch.ones(size, dtype=torch.int64, device=DEVICE),
        torch.full((size,), LONGEST, device=DEVICE),
        torch.full((size, 2), -1, device=DEVICE),
        torch.ones(size, dtype=torch.int64, device=DEVICE),
    )
    for slot, (_, _, _, tokens, longest, ends, running) in enumerate(batch, 1):
        tracks.tokens[slot, : len(tokens)] = torch.tensor(tokens)
        tracks.ends[slot, : len(ends)] = torch.tensor(ends, dtype=torch.int64)
        tracks.length[slot], tracks.max_length[slot], tracks.running[slot] = len(tokens), longest, running
    return tracks


@pytest.mark.parametrize("module", [reference, sampling])
@settings(max_examples=15)
@given(rounds())
def test_equals_one_token_after_the_other(module, batch):
    slots = torch.arange(1, len(batch) + 1, device=DEVICE).flip(0)
    tracks = tracks_of(batch)
    given = ([entry[i] for entry in batch[::-1]] for i in range(3))
    drawn, drafts, num_sound = (torch.tensor(column, dtype=torch.int64, device=DEVICE) for column in given)
    got = module.commit(drawn, drafts, num_sound, slots, tracks)
    for b, (entry, slot) in enumerate(zip(batch[::-1], slots.tolist(), strict=True)):
        fresh, accepted, ended = by_hand(*entry)
        assert (got.num_fresh[b], got.num_accepted[b], got.ended[b]) == (len(fresh), accepted, ended)
        tokens = entry[3] + fresh
        assert tracks.tokens[slot].tolist() == tokens + [9] * (LONGEST - len(tokens))
        assert tracks.length[slot] == len(tokens)
        assert tracks.running[slot] == (entry[6] and ended == RUNNING)
    outside = [0, len(batch) + 1]
    assert (tracks.tokens[outside] == 9).all()
    assert (tracks.length[outside] == 1).all()
