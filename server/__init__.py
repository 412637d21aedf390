"""The server around the engine: network, text, deadlines and cancellation. Contains no tensor code."""

from importlib import metadata


def version() -> str:
    """Return the installed version of Pilotfish; "unknown" if the package is not installed."""
    try:
        return metadata.version("pilotfish")
    except metadata.PackageNotFoundError:
        return "unknown"
