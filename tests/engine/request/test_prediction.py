"""Laws of predicted outputs: what is drafted and what is counted, as a function of the output alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.request.prediction import Prediction, TextAlignment, num_predicted
from pilotfish.engine.types import FinishReason
from tests import fakes

PROMPT = [9, 9, 9]
TOKENS = st.lists(st.integers(0, 3), max_size=60)


def aligned(prediction, output):
    """The alignment after an output that came in one piece."""
    alignment = TextAlignment(Prediction(prediction))
    assert alignment.follow([*PROMPT, *output], len(PROMPT), 1024)
    return alignment


def passes(prediction, output, k=64):
    """Passes of a target that writes `output`, if each verifies the drafts that there are."""
    alignment, tokens, count = TextAlignment(Prediction(prediction)), list(PROMPT), 0
    while (done := len(tokens) - len(PROMPT)) < len(output):
        assert alignment.follow(tokens, len(PROMPT), 1024)
        drafts, left = alignment.drafts(k), output[done:]
        kept = next((i for i, pair in enumerate(zip(drafts, left, strict=False)) if pair[0] != pair[1]), len(drafts))
        tokens += left[: kept + 1]
        count += 1
    return count


@given(TOKENS, TOKENS, st.data())
@settings(max_examples=80)
def test_state_is_a_function_of_the_output(prediction, output, data):
    """However the output came: all at once, or in pieces, with questions about drafts in between."""
    alignment, tokens = TextAlignment(Prediction(prediction)), list(PROMPT)
    while len(tokens) < len(PROMPT) + len(output):
        size = data.draw(st.integers(1, 7))
        tokens += output[len(tokens) - len(PROMPT) :][:size]
        alignment.follow(tokens, len(PROMPT), 1024)
        alignment.drafts(5)
    whole = aligned(prediction, output)
    assert alignment.drafts(64) == whole.drafts(64)
    assert alignment.num_had == whole.num_had <= min(len(prediction), len(output))


@given(TOKENS, TOKENS, st.integers(0, 64))
@settings(max_examples=60)
def test_fewer_drafts_are_the_first_of_more(prediction, output, k):
    alignment = aligned(prediction, output)
    assert alignment.drafts(k) == alignment.drafts(64)[:k]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300))
@settings(max_examples=30)
def test_a_right_prediction_is_drafted_to_its_end(output):
    assert passes(output, output) == -(-len(output) // 65)
    assert aligned(output, output).num_had == len(output)
    assert aligned(output, output).drafts(8) == ()


def test_an_output_that_returns_after_each_kind_of_difference():
    file = list(range(100, 300))
    inserted = [*file[:80], 1, 2, 3, 4, 5, 6, 7, *file[80:]]
    deleted = [*file[:80], *file[120:]]
    changed = [*file[:80], 1, 2, *file[83:]]
    moved = [*file[:40], *file[120:], *file[40:120]]
    for output in (inserted, deleted, changed, moved):
        alignment = aligned(file, output[:-5])
        assert alignment.drafts(5) == tuple(output[-5:])
        assert passes(file, output) <= -(-len(output) // 65) + 12
    assert aligned(file, inserted).num_had == aligned(file, moved).num_had == 200
    assert aligned(file, deleted).num_had == 160
    assert aligned(file, changed).num_had == 197


def test_a_replacement_is_expected_again():
    """A name is changed in ten places, from two tokens to three: its change is drafted once it was seen."""
    file = [token for i in range(10) for token in (*range(100 + 10 * i, 109 + 10 * i), 7, 8)]
    output = [token for i in range(10) for token in (*range(100 + 10 * i, 109 + 10 * i), 1, 2, 3)]
    assert passes(file, output) <= 8
    # And not any more where the output keeps the name.
    kept = [*output[:72], *file[66:]]
    assert aligned(file, kept).drafts(64) == ()
    assert passes(file, kept) <= 10


@given(TOKENS, TOKENS.filter(bool), st.data())
@settings(max_examples=60)
def test_what_counts_does_not_depend_on_what_was_followed(output, prediction, data):
    """Neither on an alignment that is behind, nor on tokens beyond those that count."""
    count = st.integers(0, len(output))
    keep, followed = data.draw(st.none() | count), data.draw(count)
    sequence = fakes.sequence([*PROMPT, *output], prompt_len=len(PROMPT), prediction=tuple(prediction))
    sequence.alignment = TextAlignment(Prediction(prediction))
    sequence.alignment.follow(sequence.tokens, len(PROMPT), most=followed)
    assert num_predicted(sequence, FinishReason.STOP, keep) == aligned(prediction, output[:keep]).num_had


@given(st.lists(st.integers(0, 2) | st.integers(2**17, 2**17 + 1), max_size=80), st.integers(0, 80))
@settings(max_examples=60)
def test_the_nearest_places_of_a_pair_are_found(prediction, near):
    for pair in ((0, 0), (0, 1), (2**17, 0), (0, 2**17), (7, 7)):
        every = [i for i in range(2, len(prediction) + 1) if tuple(prediction[i - 2 : i]) == pair]
        nearest = [*[i for i in every if i < near][-8:], *[i for i in every if i >= near][:8]]
        assert list(Prediction(prediction).places(pair, near)) == nearest


def test_an_output_that_was_continued_is_followed_in_parts():
    tokens = [*PROMPT, *range(3000)]
    alignment = TextAlignment(Prediction(range(5000)))
    assert [alignment.follow(tokens, len(PROMPT), 1024) for _ in range(3)] == [False, False, True]
    assert alignment.drafts(2) == (3000, 3001)
