"""Which Pilotfish this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version; "unknown" when run from a folder that was never installed."""
    try:
        return metadata.version("pilotfish")
    except metadata.PackageNotFoundError:
        return "unknown"
