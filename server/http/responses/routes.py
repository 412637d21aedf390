"""The routes of OpenAI's Responses API, without anything stored: each request has the whole conversation."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from engine.errors import shown
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.http.calls import Services
from server.http.responses.answers import ResponsesAnswer
from server.http.responses.types import ResponsesBody
from server.http.routes import GeneratingRoutes


def add_responses(app: FastAPI, services: Services) -> None:
    """Add the routes."""
    router, routes = APIRouter(), GeneratingRoutes(services)

    @router.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """Continue a conversation, in the format of OpenAI's responses."""
        return await routes.respond(ResponsesBody, _answer, request)

    @router.api_route("/v1/responses/{response_id}", methods=["GET", "DELETE"], include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Answer 404: nothing is stored."""
        raise HTTPException(404, f"no response has the id {shown(response_id)}: this server stores none")

    app.include_router(router)


def _answer(body: ResponsesBody, message: pb.GenerateRequest, call: Call) -> ResponsesAnswer:
    return ResponsesAnswer(body, call, message.messages)
