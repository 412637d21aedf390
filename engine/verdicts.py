"""Outcomes of the tests of a load: of the equivalence of replaced parts, and the self-test. Knows no model.

A load tests every part that it replaces, on the model's own weights: for a model of 1.1B that takes about a second. The
tests run in the same order in every process with the same config. So the engine that takes the place of a lost one is
given the outcomes, and runs only those tests that failed. Tests that also record something of the model are no part of
this, such as those of attention: they run at every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Verdicts:
    """The outcomes of the tests of a load, in their order. `known`: those of an earlier load of the same model."""

    def __init__(self, known: Iterable[bool] = ()) -> None:
        self._known = iter(known)
        self.found: list[bool] = []

    def of(self, test: Callable[[], bool]) -> bool:
        """Return the outcome of the next test, which runs unless it is known to pass."""
        passes = next(self._known, False)
        try:
            passes = passes or test()
        finally:
            self.found.append(passes)
        return passes


_current: ContextVar[Verdicts | None] = ContextVar("verdicts", default=None)


@contextmanager
def collected(verdicts: Verdicts) -> Iterator[None]:
    """Within it the tests of this thread use, and add to, `verdicts`."""
    before = _current.set(verdicts)
    try:
        yield
    finally:
        _current.reset(before)


def verdict(test: Callable[[], bool]) -> bool:
    """Return the outcome of a test of a load, which runs unless an earlier process has passed it."""
    verdicts = _current.get()
    return test() if verdicts is None else verdicts.of(test)
