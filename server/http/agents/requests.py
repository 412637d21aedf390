"""Conversion that the agents' protocols have in common. Knows no engine."""

from __future__ import annotations

from pilotfish.v1 import generation_pb2 as pb
from server.http.agents.fields import AgentBody, Json
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


def effort_arguments(effort: str) -> Json:
    """Return the variables of the chat template that ask for an effort of reasoning.

    Most templates have a switch, and no degrees.
    """
    arguments: Json = {"reasoning_effort": effort}
    return arguments | {"enable_thinking": False} if effort == "none" else arguments
