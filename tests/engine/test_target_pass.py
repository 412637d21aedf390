"""A pass that raises: whoever is at fault ends alone, the others get the very tokens they would have got."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pilotfish.engine import engine as engine_module
from pilotfish.engine import target_pass
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import RankLost
from pilotfish.engine.params import Verification
from pilotfish.engine.types import FinishReason, KVCursor, Request, Sequence
from tests import fakes

VOCAB = 11
LAW = fakes.hashed_law(VOCAB)
SICK = 9  # a prompt that begins with it is poison
WELL = [(1, 2, 3), (4, 5), (6, 7, 8, 1, 2)]


def requests(**sampling: object) -> list[Request]:
    prompts = {"well0": WELL[0], "sick": (SICK, 1), "well1": WELL[1], "well2": WELL[2]}
    return [fakes.request(ids, name=name, **{"max_tokens": 15, **sampling}) for name, ids in prompts.items()]


def poisoned(context: tuple[int, ...]) -> torch.Tensor:
    if context[0] == SICK and len(context) > 4:
        raise RuntimeError("poison")
    return LAW(context)


def engine_with(law: object, **config: object) -> Engine:
    return fakes.fake_engine(law, vocab_size=VOCAB, draft_law=LAW, **{"num_draft_tokens": 3, **config})


def started(law: object, *, steps: int) -> Engine:
    """One that has made so many steps of the requests."""
    engine = engine_with(law)
    for request in requests():
        engine.add(request)
    for _ in range(steps):
        engine.step()
    return engine


def wanted(**sampling: object) -> fakes.Outputs:
    return fakes.run(engine_with(LAW), requests(**sampling))


def assert_only_the_sick_one_ended(found: fakes.Outputs, whole: fakes.Outputs) -> None:
    for name, tokens in whole.tokens.items():
        if name == "sick":
            assert found.finished[name].reason is FinishReason.ERROR
            assert found.tokens[name] == tokens[: len(found.tokens[name])]
            assert "poison" not in found.finished[name].error, "what went wrong is for the log"
        else:
            assert found.tokens[name] == tokens
            assert found.finished[name].reason is FinishReason.LENGTH
            assert found.prompt_logprobs.get(name) == whole.prompt_logprobs.get(name)


@pytest.mark.parametrize("rule", list(Verification))
@pytest.mark.parametrize("proposer", ["none", "model", "ngram"])
@pytest.mark.parametrize("sampling", [{}, {"prompt_logprobs": 2, "logprobs": 1}], ids=["tokens", "logprobs"])
def test_a_poison_in_the_target_ends_its_own_request(
    rule: Verification, proposer: str, sampling: dict[str, object]
) -> None:
    sampling = sampling | ({"temperature": 1.0, "seed": 5} if rule is Verification.COUPLED else {})
    found = fakes.run(engine_with(poisoned, verification=rule, proposer=proposer), requests(**sampling))
    assert_only_the_sick_one_ended(found, wanted(**sampling))


def sampling_fails(fed: list[SimpleNamespace], _logits: object) -> bool:
    return any(f.sequence.request_id == "sick" and f.sequence.num_generated > 4 for f in fed)


def committing_fails(sequence: Sequence, _fresh: object) -> bool:
    return sequence.request_id == "sick"


@pytest.mark.parametrize(
    ("module", "name", "fails"),
    [(target_pass, "verify_rows", sampling_fails), (engine_module, "advance_grammar", committing_fails)],
)
def test_a_poison_in_the_sampler_or_the_commit_ends_its_own_request(
    module: ModuleType, name: str, fails: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, function = wanted(), getattr(module, name)

    def faulty(*given: object) -> object:
        if fails(*given):
            raise RuntimeError("poison")
        return function(*given)

    monkeypatch.setattr(module, name, faulty)
    engine, found = started(LAW, steps=0), fakes.Outputs()
    while engine.has_work:
        found.take(engine.step().events)
        engine.check_invariants()
    assert_only_the_sick_one_ended(found, whole)


def test_a_batch_that_is_too_large_is_fed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory runs out for many at once: nobody is at fault, and nobody ends."""
    engine = engine_with(LAW)
    forward = engine.runner.forward

    def faulty(feeds):
        if len(feeds) > 1:
            raise MemoryError
        return forward(feeds)

    monkeypatch.setattr(engine.runner, "forward", faulty)
    assert fakes.run(engine, requests()).tokens == wanted().tokens


def test_an_engine_that_fails_for_everybody_is_given_up() -> None:
    broken = False

    def law(context: tuple[int, ...]) -> torch.Tensor:
        if broken:
            raise RuntimeError("no device")
        return LAW(context)

    engine = started(law, steps=3)
    broken = True
    with pytest.raises(RuntimeError, match="no device"):
        engine.step()


@pytest.mark.parametrize("together", [1, 4])
def test_no_number_of_poison_requests_stops_an_engine_that_works(together: int) -> None:
    def law(context: tuple[int, ...]) -> torch.Tensor:
        if context[0] == SICK:
            raise RuntimeError("poison")
        return LAW(context)

    engine = engine_with(law)
    for _ in range(12):
        sick = [fakes.request((SICK,), name=f"sick{i}") for i in range(together)]
        found = fakes.run(engine, sick)
        assert {end.reason for end in found.finished.values()} == {FinishReason.ERROR}
        engine.check_invariants()
    assert fakes.run(engine, requests()).tokens["well0"] == wanted().tokens["well0"]


def test_a_full_engine_is_not_tried_while_others_hold_its_pages() -> None:
    """No page is left for a trial: the others' own passes tell whether it works."""
    engine = engine_with(poisoned, max_batch_size=2, max_batch_tokens=2)
    pool = engine.scheduler.target_pool
    cursor = KVCursor()
    assert pool.reserve(cursor, pool.num_pages * pool.page_size)
    engine._blame_engine_or_requests(RuntimeError("poison"))
    pool.release(cursor)


def test_an_engine_serves_again_after_a_step_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(LAW, steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "plan", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.finish_all(FinishReason.ERROR)
    engine.check_invariants()
    assert not engine.has_work
    assert fakes.run(engine, requests()).tokens == wanted().tokens


def test_a_lost_rank_is_nobodys_fault_and_ends_the_step() -> None:
    tried = []

    def lost(context: tuple[int, ...]) -> torch.Tensor:
        tried.append(context)
        raise RankLost("rank 0 lost the connection")

    with pytest.raises(RankLost):
        started(lost, steps=1)
    assert len(tried) == 1, "what cannot succeed was tried again"
