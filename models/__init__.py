"""The embedded pair: a target and a draft small enough to live in the repository, and where they lie."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def embedded_target() -> Path:
    """Folder of the embedded target model (config, tokenizer, safetensors)."""
    return _HERE / "target"


def embedded_draft() -> Path:
    """Folder of the embedded draft model, distilled from the target; same tokenizer."""
    return _HERE / "draft"


def embedded_medusa() -> Path:
    """Folder of the Medusa heads for the embedded target."""
    return _HERE / "medusa"


def embedded_eagle() -> Path:
    """Folder of the EAGLE head for the embedded target."""
    return _HERE / "eagle"
