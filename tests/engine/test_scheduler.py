"""Who goes first, who gets how much, and who has to give way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.turns import MASK_SECONDS
from pilotfish.engine.types import Sequence
from tests import fakes


def sequence(name: str, prompt: int, *, max_len: int | None = None, num_draft: int = 0) -> Sequence:
    fixed = {"mode": SpeculationMode.FIXED, "k": num_draft}
    return fakes.sequence([1] * prompt, name=name, max_len=max_len or prompt + 8, **fixed)


def scheduler(pages: int = 100, page_size: int = 4, size: int = 8, tokens: int = 32) -> Scheduler:
    return Scheduler(PagePool(pages, page_size), size, tokens, {"model": PagePool(pages, page_size)})


def step(schedule: Scheduler) -> dict[str, tuple[int, int]]:
    """Plan and do it, one token each: name -> (tokens fed, drafts)."""
    schedule.admit()
    plan = schedule.plan()
    for work in plan.works:
        work.sequence.target.advance(work.span.stop)
        if work.reaches_end:
            work.sequence.tokens.append(1)
    schedule.check_invariants()
    return {work.sequence.request_id: (len(work.span), work.num_draft) for work in plan.works}


def test_first_come_first_served_and_short_ones_do_not_overtake() -> None:
    schedule = scheduler(pages=6)
    for one in (sequence("a", 12, max_len=12), sequence("long", 16, max_len=16), sequence("short", 1, max_len=2)):
        schedule.add(one)
    step(schedule)
    assert [s.request_id for s in schedule.running] == ["a"]
    schedule.remove(schedule.running[0])
    step(schedule)
    assert [s.request_id for s in schedule.running] == ["long", "short"]


def test_prompts_share_the_budget_and_short_ones_finish_soon() -> None:
    schedule = scheduler(tokens=20)
    for name, length in (("long", 100), ("short", 3), ("middle", 12)):
        schedule.add(sequence(name, length))
    assert step(schedule) == {"short": (3, 0), "middle": (9, 0), "long": (8, 0)}


def test_prompts_come_before_drafts_and_newest_tokens_before_both() -> None:
    schedule = scheduler(tokens=10)
    schedule.add(sequence("steady", 1, max_len=40, num_draft=8))
    step(schedule)
    schedule.add(sequence("new", 7))
    assert step(schedule) == {"steady": (1, 2), "new": (7, 0)}


def test_the_newest_gives_way_and_comes_back_first() -> None:
    schedule = scheduler(pages=6, page_size=2, size=4)
    for name in ("old", "young"):
        schedule.add(sequence(name, 2, max_len=12))
    schedule.add(sequence("waits", 2, max_len=12))
    seen = []
    for _ in range(7):
        step(schedule)
        seen.append([s.request_id for s in schedule.waiting])
    assert ["waits"] in seen
    assert seen[-1] == ["young", "waits"], "the newest gave way, and stands before those that never ran"
    assert [s.request_id for s in schedule.running] == ["old"]


def test_admission_keeps_a_page_for_those_that_grow() -> None:
    schedule = scheduler(pages=3, page_size=2, size=4)
    schedule.add(sequence("grows", 4, max_len=6))
    step(schedule)
    schedule.add(sequence("second", 2, max_len=2))
    schedule.admit()
    assert [s.request_id for s in schedule.waiting] == ["second"], "it would take the page that is needed next"


def test_room() -> None:
    schedule = scheduler(pages=3, page_size=4, size=2)
    assert schedule.has_room
    schedule.add(sequence("a", 4, max_len=4))
    assert schedule.has_room
    schedule.add(sequence("b", 8, max_len=8))
    assert not schedule.has_room, "two are on their way and two is the most"
    schedule.remove(schedule.waiting[0])
    schedule.add(sequence("c", 4, max_len=4))
    assert not schedule.has_room
    schedule.remove(schedule.waiting[0])
    schedule.remove(schedule.waiting[0])
    schedule.add(sequence("d", 12, max_len=12))
    assert not schedule.has_room, "a place is free and no page"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(8, 40), st.integers(0, 8))
def test_the_budget_is_kept_and_used(prompts: list[int], tokens: int, num_draft: int) -> None:
    schedule = scheduler(pages=200, tokens=tokens)  # enough for 8 of 90 tokens: nobody waits for a page
    for i, length in enumerate(prompts):
        schedule.add(sequence(str(i), length, max_len=90, num_draft=num_draft))
    for _ in range(12):
        left = sum(s.todo for s in (*schedule.running, *schedule.waiting))
        fed = step(schedule)
        assert sum(own for own, _ in fed.values()) == min(tokens, left), "work was there and budget was left"
        assert sum(own + drafts for own, drafts in fed.values()) <= tokens


def test_a_draft_beyond_the_end_is_never_planned() -> None:
    schedule = scheduler()
    schedule.add(sequence("s", 1, max_len=6, num_draft=8))
    assert [step(schedule)["s"][1] for _ in range(5)] == [4, 3, 2, 1, 0]


def test_outputs_whose_masks_take_long_take_turns_and_hold_up_nobody_else() -> None:
    schedule = scheduler(size=16)
    costly, cheap = [sequence(f"c{i}", 1, max_len=40, num_draft=4) for i in range(5)], sequence("a", 1, max_len=40)
    for one in (*costly, cheap):
        schedule.add(one)
    step(schedule)
    turns: Counter[str] = Counter()
    for _ in range(10):
        for one in costly:
            one.mask_seconds = 0.02
        plan = schedule.plan()
        turns.update(work.sequence.request_id for work in plan.works)
        assert sum(work.sequence.mask_seconds * (1 + work.num_draft) for work in plan.works) <= MASK_SECONDS
        assert cheap in [work.sequence for work in plan.works]
        for work in plan.works:
            work.sequence.target.advance(work.span.stop)
            work.sequence.tokens.append(1)
        schedule.check_invariants()
    assert turns.pop("a") == 10
    assert sum(turns.values()) == 20
    assert {3, 4, 5} >= set(turns.values())


def test_a_mask_that_alone_takes_too_long_has_its_turn() -> None:
    schedule = scheduler()
    both = [sequence(name, 1, num_draft=4, max_len=40) for name in "ab"]
    for one in both:
        schedule.add(one)
    step(schedule)
    for one in both:
        one.mask_seconds = 9.0
    seen = [schedule.plan().works for _ in range(4)]
    assert [[work.sequence.request_id for work in works] for works in seen] == [["a"], ["b"], ["a"], ["b"]]
    assert {work.num_draft for works in seen for work in works} == {0}


def test_usual_masks_cost_no_drafts_and_a_fault_in_drafts_costs_all() -> None:
    schedule = scheduler(tokens=64)
    usual, faulty = sequence("u", 1, max_len=40, num_draft=4), sequence("f", 1, max_len=40, num_draft=4)
    for one in (usual, faulty):
        schedule.add(one)
    step(schedule)
    usual.mask_seconds = faulty.mask_seconds = 1e-5
    faulty.fault = "its limits were met"
    assert [work.num_draft for work in schedule.plan().works] == [4, 0]
