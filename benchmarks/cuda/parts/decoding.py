"""Complete engines: plain decoding and rounds relative to their limits, and AUTO relative to plain decoding.

Limits are measured for this card in the same process: the bytes that a pass must read over the rate of a copy, or its
operations over the rate of a large matmul, whichever takes longer.
"""

from __future__ import annotations

import gc

from benchmarks.cuda.card import Card
from benchmarks.cuda.engines import (
    Measured,
    RandomPair,
    best_drafts,
    engine_of,
    expected_tokens,
    gain_limit,
    positions_needed,
    round_limit,
    settled,
    warm_up_rounds,
)
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from pilotfish.engine.startup.calibrate import calibrate

MOST_DRAFTS, MOST_AUTO = 7, 4
_STEP = ("ms a step", "longest / median", "tokens each", "tok/s", "of limit", "host ms", "shown ms")


def plain(setting: Setting, section: PartReport) -> None:
    """Measure the target alone, with one token of each sequence per step: as graphs, and in steps that wait."""
    card = Card.measured(setting.device)
    pair, size = RandomPair.of(card, setting.target, None), max(setting.sizes)
    longest = positions_needed(setting.context, size, setting.steps, 0)
    _explain(setting, section)
    section.table("loop", "batch", *_STEP)
    for loop in ("rounds", "plain"):
        engine = engine_of(pair, card, size, longest, loop=loop)
        for batch in setting.sizes:
            got = settled(engine, card, batch, setting.context, 0, setting.steps)
            limit = batch / round_limit(pair, card, batch, setting.context, 0)
            section.row(loop, batch, *_told(got, batch, limit))
            section.number(f"{loop}, {batch}", **_numbers(got, batch, limit))
        del engine
        gc.collect()


def rounds(setting: Setting, section: PartReport) -> None:
    """Measure the best K by the limits and its neighbours, against plain decoding in the same engine."""
    card = Card.measured(setting.device)
    pair, most = RandomPair.of(card, setting.target, setting.draft), max(setting.sizes)
    longest = positions_needed(setting.context, most, setting.steps, MOST_DRAFTS)
    engine = engine_of(pair, card, most, longest, setting.acceptance, MOST_DRAFTS)
    _explain(setting, section)
    section.table("batch", "K", *_STEP, "speed-up", "of its limit")
    for size in setting.sizes:
        best = best_drafts(pair, card, size, setting.context, setting.acceptance, MOST_DRAFTS)
        alone = 0.0
        for k in (0, best, *({max(1, best - 1), min(MOST_DRAFTS, best + 1)} - {best})):
            got = settled(engine, card, size, setting.context, k, setting.steps)
            limit = size * expected_tokens(setting.acceptance, k) / round_limit(pair, card, size, setting.context, k)
            alone = alone or _rate(got, size)
            gain = _rate(got, size) / alone
            share = gain / gain_limit(pair, card, size, setting.context, setting.acceptance, k)
            section.row(size, k, *_told(got, size, limit), f"{gain:.2f}", f"{share:.0%}" if k else "")
            section.number(f"{size}, K {k}", **_numbers(got, size, limit), speed_up=gain, of_its_limit=share)


def auto(setting: Setting, section: PartReport) -> None:
    """Compare AUTO with plain decoding, at a high and at a low acceptance."""
    card = Card.measured(setting.device)
    pair, most = RandomPair.of(card, setting.target, setting.draft), max(setting.auto_sizes)
    longest = positions_needed(setting.context, most, setting.strange + setting.steps, MOST_AUTO)
    section.say(f"K up to {MOST_AUTO}. Each K has had its rounds, and costs are calibrated as by a server.")
    section.table("batch", "acceptance", "plain, tok/s", "of limit", "AUTO, tok/s", "AUTO / plain", "tokens each")
    for acceptance in (setting.acceptance, setting.low_acceptance):
        engine = engine_of(pair, card, most, longest, acceptance, MOST_AUTO)
        for size in setting.auto_sizes:
            warm_up_rounds(engine, size, MOST_AUTO)
        calibrate(engine, setting.calibration)
        for size in setting.auto_sizes:
            none = settled(engine, card, size, setting.context, 0, setting.steps)
            free = settled(engine, card, size, setting.context, None, setting.steps, setting.strange)
            rates = _rate(none, size), _rate(free, size)
            share = rates[0] * round_limit(pair, card, size, setting.context, 0) / size
            ratio = rates[1] / rates[0]
            cells = f"{rates[0]:.0f}", f"{share:.0%}", f"{rates[1]:.0f}", f"{ratio:.2f}", f"{free.tokens:.2f}"
            section.row(size, acceptance, *cells)
            section.number(f"{size} at {acceptance}", plain=rates[0], of_limit=share, auto=rates[1], ratio=ratio)
        del engine
        gc.collect()


def _explain(setting: Setting, section: PartReport) -> None:
    section.say(
        f"Context {setting.context}, temperature 1, synthetic acceptance {setting.acceptance}. Host: Python's time "
        "per step; shown: time in which the device is idle meanwhile. Plain steps wait for the device."
    )


def _rate(got: Measured, size: int) -> float:
    """Return tokens per second of all sequences."""
    return size * got.tokens / got.seconds


def _told(got: Measured, size: int, limit: float) -> tuple[str, ...]:
    """Return the cells of `_STEP`; `limit` in tokens per second."""
    rate = _rate(got, size)
    return (
        f"{got.seconds * 1e3:.2f}", f"{got.longest:.1f}", f"{got.tokens:.2f}", f"{rate:.0f}", f"{rate / limit:.0%}",
        f"{got.host_seconds * 1e3:.2f}", f"{got.shown * 1e3:.2f}" if got.device_seconds else "",
    )  # fmt: skip


def _numbers(got: Measured, size: int, limit: float) -> dict[str, float]:
    rate = _rate(got, size)
    return {"seconds": got.seconds, "longest": got.longest, "rate": rate, "of_limit": rate / limit,
            "host_seconds": got.host_seconds, "shown": got.shown}  # fmt: skip
