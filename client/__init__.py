"""Clients for a Pilotfish server: `Client` and `AsyncClient`. They use the protocol only and load no model."""

from pilotfish.client.async_client import AsyncClient
from pilotfish.client.connection import Retry, Tls
from pilotfish.client.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RequestFailedError,
    ServerFaultError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from pilotfish.client.options import ChatMessage, GenerateOptions
from pilotfish.client.results import (
    Candidate,
    Completion,
    Delta,
    Event,
    Finished,
    Load,
    ModelInfo,
    Output,
    Piece,
    ServerInfo,
    Speculation,
    SpeculationStats,
    Timing,
    TokenLogprob,
    Usage,
)
from pilotfish.client.sync_client import Client

__all__ = [
    "AbortedError", "AlreadyExistsError", "AsyncClient", "CancelledError", "Candidate", "ChatMessage", "Client",
    "Completion", "DeadlineExceededError", "Delta", "Event", "FieldViolation", "Finished", "GenerateOptions",
    "InvalidRequestError", "Load", "ModelInfo", "NotFoundError", "Output", "PermissionDeniedError", "Piece",
    "QueueFullError", "RequestFailedError", "Retry", "ServerFaultError", "ServerInfo", "Speculation",
    "SpeculationStats", "Timing", "Tls", "TokenLogprob", "UnauthenticatedError", "UnavailableError",
    "UnsupportedError", "Usage",
]  # fmt: skip
