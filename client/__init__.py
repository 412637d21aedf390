"""Talk to a Pilotfish server: `Client` and `AsyncClient`. Knows the protocol, and no model."""

from client.async_client import AsyncClient
from client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    NotFound,
    QueueFull,
    RequestFailed,
    ServerFault,
    Unavailable,
    Unsupported,
)
from client.options import Options
from client.results import (
    Completion,
    Delta,
    Event,
    Finished,
    Load,
    ModelInfo,
    Piece,
    ServerInfo,
    Speculation,
    SpeculationStats,
    Timing,
    Usage,
)
from client.sync_client import Client

__all__ = [
    "Aborted",
    "AlreadyExists",
    "AsyncClient",
    "Cancelled",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "Event",
    "FieldViolation",
    "Finished",
    "InvalidRequest",
    "Load",
    "ModelInfo",
    "NotFound",
    "Options",
    "Piece",
    "QueueFull",
    "RequestFailed",
    "ServerFault",
    "ServerInfo",
    "Speculation",
    "SpeculationStats",
    "Timing",
    "Unavailable",
    "Unsupported",
    "Usage",
]
