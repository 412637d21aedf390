"""Pilotfish: exact speculative decoding in ragged batches, as a server, a client and a library.

>>> from pilotfish import LLM, AsyncClient, Client, SamplingParams

`pilotfish.client` has the errors and results of clients, `pilotfish.engine` those of `LLM`, and `pilotfish.v1` the
stubs of the gRPC protocol. In the repository `engine`, `server`, `client` and `models` are links to the folders of
those names; a wheel has the folders themselves here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pilotfish.client import AsyncClient, Client, Delta, Finished
    from pilotfish.engine import LLM, SamplingParams

__all__ = ["LLM", "AsyncClient", "Client", "Delta", "Finished", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import lazily: a client needs no torch, and `LLM` no gRPC."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "engine" if name in {"LLM", "SamplingParams"} else "client"
    return getattr(importlib.import_module(f"pilotfish.{package}"), name)
