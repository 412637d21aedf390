"""Whether and where the host waits for the device in steady decoding; torch reports each synchronisation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.cuda.card import Card
from benchmarks.cuda.engines import RandomPair, empty, engine_of, fill, warm_up_rounds
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from pilotfish.engine.engine import Engine
from pilotfish.engine.startup.calibrate import calibrate

_MOST, _SIZE = 4, 4  # drafts, sequences
_SMALL_PAGE = 4  # tokens: so small that nearly every round enters a new page
_TOLD = "synchronizing CUDA operation"  # in torch's warning
_ROOT = Path(__file__).resolve().parents[3]


class Waits(Exception):
    """Unexpected: steps in which no sequence starts or ends wait for the device."""


def count(setting: Setting, section: PartReport) -> None:
    """Measure fixed K with large pages, then AUTO with small pages, where K, pages and lengths change all the time."""
    card = Card.measured(setting.device)
    pair, steps, found = RandomPair.of(card, setting.draft, setting.draft), setting.steps, Counter[str]()
    section.table("drafts", "page", "steps", "synchronisations")
    for k, page in ((_MOST, 64), (None, _SMALL_PAGE)):
        longest = setting.context + (setting.strange + 2 * steps) * (_MOST + 1)
        engine = engine_of(pair, card, _SIZE, longest, setting.acceptance, _MOST, page)
        warm_up_rounds(engine, _SIZE, _MOST)
        calibrate(engine, setting.calibration)
        fill(engine, _SIZE, setting.context, k)
        for _ in range(setting.strange):
            engine.step()
        with recorded() as places:
            _steady(engine, steps)
        empty(engine)
        section.row("AUTO" if k is None else k, page, steps, sum(places.values()) if card.is_cuda else "needs a card")
        found += places
    if not card.is_cuda:
        section.needs_a_card("What torch tells of synchronisations")
        return
    section.number("steady", synchronisations=sum(found.values()), steps=2 * steps)
    if found:
        section.table("where", "times")
        for place, times in found.most_common():
            section.row(place, times)
        raise Waits(f"{sum(found.values())} synchronisations in {2 * steps} steps")


def _steady(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        events = engine.step().events
        assert not any(event.finished for event in events), "the host frees a slot then, which is not steady"
    assert engine.rounds.name == "rounds", "a round failed, and the rest were plain steps: see the log"


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Count torch's synchronisation warnings by line of Python; the counter is filled when the block ends."""
    places = Counter[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if _TOLD in str(warning.message):
            path = Path(warning.filename)
            places[f"{path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path}:{warning.lineno}"] += 1
