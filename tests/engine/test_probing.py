"""The allowance for probes: what it grows by, what it pays for, and when the next probe is due."""

from __future__ import annotations

import math

import pytest

from engine.probing import SHARE, TRIES, Probing
from tests.engine.test_scheduler import sequence

PLAIN = 0.025  # seconds of a plain step
ONE = sequence("r", 4)


def plain_step(probing: Probing) -> None:
    probing.next_step([])
    probing.account(PLAIN, PLAIN, 0.0, was_hit=False, has_read=False)


def probe(probing: Probing, lost: float, *, was_hit: bool = False, has_read: bool = False) -> None:
    """A step with drafts for one sequence, longer than a plain one by `lost` plain steps."""
    probing.next_step([ONE])
    probing.begin(ONE)
    probing.account(PLAIN, PLAIN * (1 + lost), 0.0, was_hit=was_hit, has_read=has_read)


def test_plain_steps_save_up_to_eight_steps_worth():
    probing = Probing()
    plain_step(probing)
    assert probing.allowance == pytest.approx(SHARE[1] * PLAIN)
    for _ in range(2000):
        plain_step(probing)
    assert probing.allowance == pytest.approx(8 * PLAIN)


def test_a_reading_is_followed_by_probes_however_long_it_took():
    probing = Probing()
    probe(probing, lost=20.0, has_read=True)
    assert probing.tries == TRIES
    probe(probing, lost=0.2)
    assert probing.tries == TRIES - 1, "one in vain"


def test_hits_are_followed_for_a_steps_worth():
    probing = Probing()
    probe(probing, lost=0.3, was_hit=True)
    assert probing.tries == TRIES
    probe(probing, lost=2.0, was_hit=True)
    assert probing.tries == TRIES - 1, "too much is owed: this hit earned no more"


def test_no_more_than_four_steps_worth_is_paid_back():
    probing = Probing()
    probe(probing, lost=20.0)
    assert probing.allowance == pytest.approx((-4 + probing.share) * PLAIN)


def test_what_was_in_vain_for_long_is_asked_half_as_often():
    probing = Probing()
    assert probing.share == SHARE[1]
    probe(probing, lost=20.0)
    assert probing.share == SHARE[0]


def test_it_rests_until_the_next_one_can_be_paid():
    probing = Probing()
    plain_step(probing)
    probing.wanted = probing.allowance + 12.5 * SHARE[1] * PLAIN
    assert probing.rest(8, 16) == 13
    steps = 0
    while probing.allowance < probing.wanted:
        plain_step(probing)
        steps += 1
    assert steps == 13
    assert probing.rest(8, 16) == 8, "at least"
    probing.wanted = probing.allowance + 100 * PLAIN
    assert probing.rest(8, 16) == 16, "at most"


@pytest.mark.parametrize("wanted", [math.inf, math.nan])
def test_where_nothing_is_known_it_rests_as_long_as_it_may(wanted):
    probing = Probing(wanted=wanted)
    plain_step(probing)
    assert probing.rest(8, 16) == 16
