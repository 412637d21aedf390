"""The head with gradients against the paper, one chain at a time: plain attention over what is fed, no trick."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from pilotfish.engine.training.eagle3 import Eagle3Shape, TrainedEagle3, config_of
from pilotfish.engine.training.store import WrittenText
from pilotfish.engine.training.trainer import measure_acceptance
from tests.engine.proposers.heads.test_eagle3 import Paper

HIDDEN, VOCAB = 16, 23
SHAPE = Eagle3Shape.fitting(HIDDEN, vocab_size=VOCAB, draft_vocab_size=9, intermediate_size=24)
KEPT = torch.tensor([0, 2, 3, 7, 11, 12, 17, 19, 22])


def head() -> TrainedEagle3:
    torch.manual_seed(0)
    made = TrainedEagle3(SHAPE, KEPT, torch.randn(VOCAB, HIDDEN))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return made


def plain_chain(model: TrainedEagle3, rows: Tensor, embedded: Tensor, drafts: int) -> list[Tensor]:
    """Logits of drafts after the positions of `rows` `[n, 3 * hidden]`; `embedded` has a row for each that is fed."""
    paper = Paper(config_of(SHAPE, (0, 1, 2), 64), dict(model.state_dict()), (0, 1, 2))
    return list(islice(paper.chain(list(rows.chunk(3, -1)), lambda n: embedded[:n]), drafts))


def test_all_chains_at_once_are_each_chain_alone() -> None:
    model, length, drafts = head(), 7, 4
    hidden, embedded = torch.randn(2, length, 3 * HIDDEN), torch.randn(2, length, HIDDEN)
    with torch.no_grad():
        at_once = list(model.unroll(hidden, embedded, drafts))
        for row in range(2):
            for t in range(length):
                possible = min(drafts, length - t)
                alone = plain_chain(model, hidden[row, : t + 1], embedded[row], possible)
                for j, logits in enumerate(alone):
                    torch.testing.assert_close(at_once[j][row, t], logits, rtol=1e-4, atol=1e-4)


def test_a_text_may_be_shorter_than_a_chain() -> None:
    model, embedding = head(), torch.randn(VOCAB, HIDDEN)
    text = WrittenText(torch.tensor([2, 3, 7]), 1, torch.randn(2, 4 * HIDDEN))
    found = measure_acceptance(model, [text], embedding, 4, torch.device("cpu"))
    assert sum(found.drafted) == 1
    assert len(list(model.unroll(torch.randn(1, 2, 3 * HIDDEN), torch.randn(1, 2, HIDDEN), 4))) == 2


def test_every_weight_has_a_gradient() -> None:
    model = head()
    drafts = model.unroll(torch.randn(1, 5, 3 * HIDDEN), torch.randn(1, 5, HIDDEN), 3)
    sum(logits.square().sum() for logits in drafts).backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


def test_acceptance_is_that_of_decoding() -> None:
    """Walked chain by chain as an engine would: each step drafts, keeps what is right, and adds a token."""
    model, drafts, prompt = head(), 3, 4
    torch.manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN)
    tokens = KEPT[torch.randint(0, len(KEPT), (40,))]
    rows = torch.randn(39, 4 * HIDDEN)
    kept, drafted = [0] * drafts, [0] * drafts
    # Half of the chains are made right, so that all lengths occur.
    for t in range(prompt - 1, 30, 2):
        chain = plain_chain(model, rows[: t + 1, : 3 * HIDDEN], embedding[tokens[1:]], 1)
        tokens[t + 2] = KEPT[chain[0].argmax()]
    known = prompt + 1
    while known < len(tokens):
        count = min(drafts, len(tokens) - known)
        chain = plain_chain(model, rows[: known - 1, : 3 * HIDDEN], embedding[tokens[1:]], count)
        guessed = [int(KEPT[logits.argmax()]) for logits in chain]
        right = 0
        while right < count and guessed[right] == int(tokens[known + right]):
            right += 1
        for j in range(count):
            drafted[j], kept[j] = drafted[j] + 1, kept[j] + (j < right)
        known += right + 1
    text = WrittenText(tokens, prompt, rows)
    found = measure_acceptance(model, [text], embedding, drafts, torch.device("cpu"))
    assert found.drafted == tuple(drafted)
    assert sum(kept) > 3
    assert abs(sum(found.kept) - sum(kept)) <= 1, "bfloat16 may decide a near-tie differently"
