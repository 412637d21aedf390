"""The version of Pilotfish."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Return the installed version; "unknown" if the package is not installed."""
    try:
        return metadata.version("pilotfish")
    except metadata.PackageNotFoundError:
        return "unknown"
