"""Conversion of the speculation settings between messages and engine types."""

from __future__ import annotations

from engine.params import SpeculationMode, SpeculationSettings, Verification
from pilotfish.v1 import generation_pb2 as pb

MODES = {
    pb.SPECULATION_MODE_AUTO: SpeculationMode.AUTO,
    pb.SPECULATION_MODE_OFF: SpeculationMode.OFF,
    pb.SPECULATION_MODE_FIXED: SpeculationMode.FIXED,
}
VERIFICATIONS = {
    pb.VERIFICATION_COUPLED: Verification.COUPLED,
    pb.VERIFICATION_REJECTION: Verification.REJECTION,
}


def speculation_settings(settings: SpeculationSettings) -> pb.SpeculationOptions:
    """Return the effective settings with every field set."""
    return pb.SpeculationOptions(
        mode=next(number for number, mode in MODES.items() if mode is settings.mode),
        num_draft_tokens=settings.num_draft_tokens,
        proposer=settings.proposer,
        verification=next(number for number, rule in VERIFICATIONS.items() if rule is settings.verification),
    )
