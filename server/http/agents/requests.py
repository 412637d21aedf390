"""Conversion that the agents' protocols have in common. Knows no engine."""

from __future__ import annotations

from pilotfish.v1 import generation_pb2 as pb
from server.http.agents.fields import AgentBody
from server.http.requests import OPENAI_TEMPERATURE, common


def without_conversation(body: AgentBody, max_tokens: int | None) -> pb.GenerateRequest:
    """Convert the fields that are no part of the conversation.

    Without a limit an answer may be as long as the context has room for; agents expect that of a limit that is larger,
    too.
    """
    request = common(body, max_tokens)
    request.stopping.fit_context = request.stopping.stop_in_answer = True
    if body.temperature is None:
        request.sampling.temperature = OPENAI_TEMPERATURE
    return request
