"""The routes that load and unload adapters, with the paths and the fields of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from engine.errors import InvalidRequest
from server.admission.adapters import AdapterCalls
from server.driver import Driver
from server.http.bodies import fields_of

_FIELDS = {"name": "lora_name", "path": "lora_path"}  # of the protocol, as the bodies call them


class UnloadAdapterBody(BaseModel):
    """The body of an unload."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str


class LoadAdapterBody(UnloadAdapterBody):
    """The body of a load."""

    lora_path: str


def add_adapters(app: FastAPI, driver: Callable[[], Driver], root: Path | None) -> None:
    """Add the routes; `driver` raises until the model is loaded, and `root` is the option `adapter_root`."""
    router, calls = APIRouter(), AdapterCalls(driver, root)

    @router.post("/v1/load_lora_adapter", response_model=None)
    async def load(request: Request) -> Response:
        """Load an adapter from a folder of the server's machine."""
        calls.require_allowed(request.scope["caller"])  # before anything is read
        body = fields_of(LoadAdapterBody, await request.body(), request.headers.get("content-type", ""))
        try:
            await calls.load(body.lora_name, body.lora_path, request.scope["caller"])
        except InvalidRequest as invalid:
            wrong = (replace(v, field=_FIELDS.get(v.field, v.field)) for v in invalid.violations)
            raise InvalidRequest(wrong) from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None)
    async def unload(request: Request) -> Response:
        """Unload an adapter as soon as no live request uses it."""
        calls.require_allowed(request.scope["caller"])
        body = fields_of(UnloadAdapterBody, await request.body(), request.headers.get("content-type", ""))
        calls.unload(body.lora_name, request.scope["caller"])
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    app.include_router(router)
