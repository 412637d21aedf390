"""The simulator against what can be reckoned by hand, and a cost table against steps of known prices."""

from __future__ import annotations

import pytest

from benchmarks.capacity.costs import CostTable, Observed
from benchmarks.capacity.simulate import SimulatedRequest, at_random, better_of_two, forecast, in_turn
from engine.control.cost_model import NUM_QUANTITIES

A_PASS, A_ROW = 0.01, 0.001


def table(acceptance=0.0, **fields):
    prices = [0.0] * NUM_QUANTITIES
    prices[0], prices[6:] = A_PASS, [A_ROW] * (NUM_QUANTITIES - 6)
    return CostTable(tuple(prices), (0.0, 0.0, 0.0), acceptance, **fields)


def test_one_request_alone_takes_what_its_passes_cost():
    found = forecast(table(), [SimulatedRequest(1.0, 10, 5)], num_draft=0)
    (served,) = found.served
    reading, each = A_PASS + 10 * A_ROW, A_PASS + A_ROW
    assert served.timeline.first_token - served.arrived == pytest.approx(reading)
    assert served.timeline.ended - served.arrived == pytest.approx(reading + 4 * each)


def test_the_network_takes_its_time_between_steps():
    slow = table(step_overhead=0.5, token_overhead=0.25)
    (served,) = forecast(slow, [SimulatedRequest(0.0, 10, 5)], num_draft=0).served
    assert served.timeline.ended == pytest.approx(A_PASS + 10 * A_ROW + 4 * (A_PASS + A_ROW) + 5 * 0.75)


@pytest.mark.parametrize("route", [at_random, in_turn, better_of_two])
def test_nobody_is_lost_and_drafts_gain_time(route):
    asked = [SimulatedRequest(0.02 * i, 20, 30) for i in range(200)]
    plain = forecast(table(), asked, replicas=3, route=route, batch=4, queue_seconds=0.5, num_draft=0)
    assert len(plain.served) + plain.refused == len(asked)
    assert plain.refused
    assert all(served.done == 30 for served in plain.served)
    cheap = CostTable(table().target, (1e-5, 1e-5, 1e-5), acceptance=0.9)
    assert forecast(cheap, asked, replicas=3, route=route, batch=4, queue_seconds=0.5).refused < plain.refused


def test_a_shorter_queue_means_less_waiting():
    asked = [SimulatedRequest(0.02 * i, 20, 30) for i in range(1500)]
    found = [forecast(table(), asked, batch=4, queue_seconds=seconds, num_draft=0) for seconds in (0.1, 1.0, 4.0)]
    waits = [one.first_token["p50"] for one in found]  # the first few come when nothing is known, and wait for long
    assert waits == sorted(waits)
    assert waits[0] < waits[2] / 2


def test_prices_are_found_again():
    known = table()
    steps = [
        Observed(n, rows, 0, n, n, n, n // 2, 1e-3 + 1e-4 * n, 1e-3 + 1e-4 * n + known.target_seconds(n, rows, 0))
        for n in range(1, 9)
        for rows in range(n, 60, 3)
    ]
    found = CostTable.fit(steps)
    assert found.target_seconds(4, 40, 0) == pytest.approx(known.target_seconds(4, 40, 0), rel=0.02)
    assert found.draft_seconds(8, 8) == pytest.approx(1.8e-3, rel=0.02)
    assert found.acceptance == pytest.approx(sum(s.accepted for s in steps) / sum(s.tried for s in steps))
