"""What a request may ask for costs a step no more than its rows: all else is made once, or of what is new alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.params import SamplingParams
from pilotfish.engine.request.intake import Intake, Limits
from pilotfish.engine.sampling import logprobs, processors
from pilotfish.engine.sampling.logprobs import record_prompt, token_logprobs
from pilotfish.engine.sampling.noise import LogitsRow, Stream
from pilotfish.engine.sampling.processors import NEVER, process
from pilotfish.engine.types import Request, Sequence
from tests import fakes

VOCAB = 12


def opened(sampling: SamplingParams, prompt: tuple[int, ...] = (1, 1, 5)) -> list[Sequence]:
    llm = fakes.fake_engine(fakes.hashed_law(VOCAB), vocab_size=VOCAB)
    return Intake(llm.config, Limits(VOCAB, 64, frozenset()), ("none",)).open(
        Request(request_id="r", token_ids=prompt, sampling=sampling)
    )


def expected(logits: torch.Tensor, row: LogitsRow) -> torch.Tensor:
    """One row token by token, in the order that the module's head gives."""
    wanted, sequence = row.sequence.request.sampling, row.sequence
    output = [*sequence.tokens[sequence.prompt_len :], *row.before]
    found = logits.clone()
    for token in range(VOCAB):
        value = found[token]
        if token in output or token in sequence.request.token_ids:
            value = value / wanted.repetition_penalty if value > 0 else value * wanted.repetition_penalty
        value = value - wanted.frequency_penalty * output.count(token) - wanted.presence_penalty * (token in output)
        value = value + wanted.logit_bias.get(token, 0.0)
        allowed = wanted.allowed_token_ids
        if token in wanted.banned_token_ids or (allowed is not None and token not in allowed):
            value = torch.tensor(NEVER)
        found[token] = value
    return found


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
options = st.builds(
    SamplingParams,
    n=st.just(2),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 0.5])),
    banned_token_ids=st.sampled_from([(), (3, 4)]),
    allowed_token_ids=st.sampled_from([None, (1, 3, 5, 7)]),
)


@settings(max_examples=15)
@given(options, options, st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), st.integers(0, 99))
def test_rows_of_growing_sequences_are_as_if_each_was_made_alone(
    first: SamplingParams, second: SamplingParams, steps: list[tuple[list[int], list[int]]], seed: int
) -> None:
    sequences = [*opened(first), *opened(second)]
    for fresh, drafts in steps:
        for sequence in sequences:
            sequence.tokens += fresh
        rows = [LogitsRow(s, tuple(drafts[:i]), Stream.COUPLED) for s in sequences for i in range(len(drafts) + 1)]
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
        want = torch.stack([expected(one, row) for one, row in zip(logits, rows, strict=True)])
        torch.testing.assert_close(process(logits, rows), want)


def test_what_follows_from_the_request_is_made_once_for_all_outputs_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may ban every token but one, and have 64 outputs with drafts: its ids are read once."""
    read: list[int] = []
    ids = processors._ids

    def counted(tokens, like):
        read.append(len(list(tokens)))
        return ids(tokens, like)

    monkeypatch.setattr(processors, "_ids", counted)
    banned, prompt = tuple(range(1, VOCAB)), (1, 2, 3) * 5
    sampling = SamplingParams(n=3, banned_token_ids=banned, logit_bias={2: 1.0}, presence_penalty=0.1)
    sequences = opened(sampling, prompt)
    for _ in range(4):
        for sequence in sequences:
            sequence.tokens.append(0)
        rows = [LogitsRow(s, (0,) * i, Stream.COUPLED) for s in sequences for i in range(3)]
        process(torch.zeros(len(rows), VOCAB), rows)
    assert sorted(read) == [1] * 12 + [1, len(banned), len(prompt)]  # new tokens, and the bias, the bans, the prompt


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=9, max_size=9), min_size=1), st.integers(0, 9)
)
def test_the_likeliest_are_those_of_a_stable_sort_whatever_is_equal(rows: list[list[float]], top: int) -> None:
    found = token_logprobs(torch.tensor(rows), [0] * len(rows), top)
    for one, row in zip(found, rows, strict=True):
        want = torch.tensor(row).double().log_softmax(-1)
        ids = want.sort(descending=True, stable=True).indices[:top].tolist()
        assert [candidate.token_id for candidate in one.top] == ids
        assert [candidate.logprob for candidate in one.top] == pytest.approx(want[ids].tolist())
        assert one.logprob == pytest.approx(float(want[0]))


def test_no_whole_chunk_of_a_prompt_is_turned_to_float64_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    of_rows = logprobs._of_rows
    monkeypatch.setattr(logprobs, "_of_rows", lambda *given: seen.append(len(given[0])) or of_rows(*given))
    logits = torch.randn(100, VOCAB)
    found = token_logprobs(logits, list(range(VOCAB)) * 9, 2)
    assert seen == [32, 32, 32, 4]
    assert [one.logprob for one in found] == [
        float(row[i % VOCAB]) for i, row in enumerate(logits.double().log_softmax(-1))
    ]


def test_positions_of_a_prompt_that_are_fed_again_are_recorded_once() -> None:
    """As after a preemption or a pass that failed."""
    logits, sampling = torch.randn(8, VOCAB), SamplingParams(prompt_logprobs=1)
    whole, again = (opened(sampling, tuple(range(9)))[0] for _ in range(2))
    record_prompt(whole, 0, logits)
    for start, stop in ((0, 3), (0, 5), (4, 8)):
        record_prompt(again, start, logits[start:stop])
    assert again.prompt_logprobs == whole.prompt_logprobs
    assert len(whole.prompt_logprobs) == 9
