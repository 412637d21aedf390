"""The ids of a stream's HTTP events, with which a caller resumes it on any server of the same model.

Each encodes everything sent up to its event: numbers of tokens instead of the tokens of gRPC's `Resume`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from pilotfish.engine.errors import InvalidRequest, shown
from pilotfish.engine.params import MAX_SEED
from pilotfish.engine.types import ReceivedOutput, Resume, TokenEvent
from pilotfish.server.streams.stream import MAX_INTERRUPTIONS, NOTHING_RECEIVED

_EVENT_ID = re.compile(
    r"(?P<fingerprint>[0-9a-f]{1,64})-(?P<seed>\d{1,20})-(?P<times>\d{1,6})-(?P<outputs>[0-9a-f:+!,]*)"
)
_OUTPUT = re.compile(r"(?P<count>[0-9a-f]{1,7})(:(?P<digest>[0-9a-f]{16}))?(?P<tail>\+)?(?P<end>!)?")


class EventIds:
    """The ids of a stream's events. `resume`: what was sent before.

    Example: "9f3a…-17-0-1c:77e0aa51c0d3e9b2,5!" has the model's fingerprint and the seed 17, never interrupted;
    28 tokens of output 0, with their digest; output 1 has ended.
    """

    def __init__(self, fingerprint: str, seed: int, resume: Resume | None = None) -> None:
        times = 0 if resume is None else min(resume.interruptions + 1, MAX_INTERRUPTIONS)
        self._prefix = f"{fingerprint}-{seed}-{times}"
        known = () if resume is None else resume.outputs  # finished for the caller, though regenerated here
        self._outputs = {
            i: replace(output, has_ended=output.has_ended or output.recount) for i, output in enumerate(known)
        }

    @property
    def newest(self) -> str:
        every = range(max(self._outputs) + 1)
        return f"{self._prefix}-{','.join(_entry(self._outputs.get(index, NOTHING_RECEIVED)) for index in every)}"

    def observe(self, event: TokenEvent) -> bool:
        """Include an event; return whether it is an end that the caller has already received."""
        output = self._outputs.get(event.index, NOTHING_RECEIVED)
        is_known = output.has_ended and event.finished is not None
        self._outputs[event.index] = replace(
            output,
            num_tokens=output.num_tokens + len(event.token_ids),
            digest=event.digest or output.digest,
            tail=bool(event.tail) if event.token_ids or event.tail else output.tail,
            has_ended=output.has_ended or event.finished is not None,
        )
        return is_known


def _entry(output: ReceivedOutput) -> str:
    digest = f":{output.digest}" if output.digest else ""
    return f"{output.num_tokens:x}{digest}{'+' * output.tail}{'!' * output.has_ended}"


def parse_event_id(event_id: str, max_n: int) -> tuple[int, Resume]:
    """Return the seed and the `Resume` encoded in an event's id. Raises InvalidRequest if it is invalid.

    `max_n`: maximum number of outputs of a stream on this server.
    """
    whole = None if event_id.count(",") >= max_n else _EVENT_ID.fullmatch(event_id)
    parts = [] if whole is None else [_OUTPUT.fullmatch(part) for part in whole["outputs"].split(",")]
    has_digests = all(part is None or (int(part["count"], 16) > 0) == (part["digest"] is not None) for part in parts)
    if whole is None or None in parts or int(whole["seed"]) > MAX_SEED or not has_digests:
        raise InvalidRequest.of("Last-Event-ID", f"is {shown(event_id)}; expected the id of an event of this server")
    outputs = tuple(
        ReceivedOutput(
            num_tokens=int(part["count"], 16),
            digest=part["digest"] or "",
            tail=part["tail"] is not None,
            has_ended=part["end"] is not None,
        )
        for part in parts
        if part is not None
    )
    return int(whole["seed"]), Resume(
        outputs=outputs, fingerprint=whole["fingerprint"], interruptions=int(whole["times"])
    )
