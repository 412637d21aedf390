"""Where tests take hold of a server and its engine: a call of their own before each call of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def before(patch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[..., object]) -> None:
    """Call `act` with the arguments of each call of a function or method before the call itself."""
    call = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        act(*args, **options)
        return call(*args, **options)

    patch.setattr(owner, name, watched)
