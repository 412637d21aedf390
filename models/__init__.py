"""The embedded pair (a target and a draft that are small enough for the repository), and the folders of its files."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def embedded_target() -> Path:
    """Return the folder of the embedded target model (config, tokenizer, safetensors)."""
    return _HERE / "target"


def embedded_draft() -> Path:
    """Return the folder of the embedded draft model, which is distilled from the target and has the same tokenizer."""
    return _HERE / "draft"


def embedded_medusa() -> Path:
    """Return the folder of the Medusa heads for the embedded target."""
    return _HERE / "medusa"


def embedded_eagle() -> Path:
    """Return the folder of the EAGLE head for the embedded target."""
    return _HERE / "eagle"
