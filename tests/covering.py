"""Which cases of a grid `make test` runs: each value is met with some of the others. The rest is marked slow."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def covering(rows: Iterable[object], columns: Iterable[object], every: int = 5, first: int = 0) -> list[ParameterSet]:
    """All cells of a grid; those on every n-th diagonal are in `make test`, from diagonal `first` on.

    3 rows, 5 columns, every 3: the first row is met with columns 0 and 3, the second with 2, the third with 1 and 4.
    No row is left out if there are at least `every` columns, and no column if there are at least so many rows.
    """
    return [
        pytest.param(row, column, id=f"{row}-{column}", marks=[] if (i + j) % every == first else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def some(cases: Iterable[object], kept: Iterable[object]) -> list[ParameterSet]:
    """All cases; `make test` has those that are kept.

    Raises:
        ValueError: One that is kept is no case.
    """
    cases, kept = list(cases), list(kept)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"no such cases: {unknown}")
    return [pytest.param(case, id=str(case), marks=[] if case in kept else pytest.mark.slow) for case in cases]
