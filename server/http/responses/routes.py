"""The routes of OpenAI's Responses API, without anything stored: each request has the whole conversation."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from engine.errors import shown
from server.admission.admission import Call
from server.http.agents.answers import AgentAnswer
from server.http.agents.routes import AgentRoutes
from server.http.calls import Services
from server.http.responses.answers import ResponsesAnswer
from server.http.responses.requests import functions, responses_request
from server.http.responses.types import ResponsesBody


def add_responses(app: FastAPI, services: Services) -> None:
    """Add the routes."""
    router = APIRouter()
    routes = AgentRoutes(ResponsesBody, lambda body, _: responses_request(body), _answer, services)

    @router.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """Continue a conversation, in the format of OpenAI's responses."""
        return await routes.respond(request)

    @router.api_route("/v1/responses/{response_id}", methods=["GET", "DELETE"], include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Answer 404: nothing is stored."""
        raise HTTPException(404, f"no response has the id {shown(response_id)}: this server stores none")

    app.include_router(router)


def _answer(body: ResponsesBody, call: Call) -> AgentAnswer:
    return ResponsesAnswer(
        call.wanted.request_id,
        call.wanted.model,
        functions(body),
        body.echo(),
        is_sealed="reasoning.encrypted_content" in body.include,
    )
