"""Kernels are interpreted on the CPU, element by element; where that cannot be done, their tests are skipped."""

from __future__ import annotations

import pytest

from tests.interpreting import WHY_NOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/kernels/" not in item.nodeid:
            continue
        # exp of a large number is inf, and x / inf is the 0 that is wanted.
        item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"))
        if WHY_NOT:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
