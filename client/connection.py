"""How to reach servers: addresses, balancing, retries, TLS and a token. Knows gRPC's options, and no method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import grpc

# A server that was not there yet is tried again within a second; gRPC would let two minutes pass.
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))
# A server whose machine vanished is noticed; not more often than servers bear.
_KEEPALIVE = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))
MAX_ATTEMPTS = 5  # gRPC makes no more
# CANCELLED, for gRPC says that of calls which reach a server while it closes its door (grpc/grpc#41785). A call that
# its own caller cancels is over before any of this.
_TRY_AGAIN = ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"]
_RETRIED = [{"service": "pilotfish.v1.InferenceService"}, {"service": "pilotfish.v1.ControlService"}]


@dataclass(frozen=True, slots=True)
class Retry:
    """gRPC's own retries: of calls of which nothing has come back yet, so nothing is ever generated twice for a reader.

    A server that says when to come again is obeyed, else pauses grow from `first_pause` to `longest_pause` (seconds).
    """

    attempts: int = 4
    first_pause: float = 0.2
    longest_pause: float = 5.0

    def policy(self) -> dict[str, Any]:
        """As a service config has it."""
        return {
            "maxAttempts": min(self.attempts, MAX_ATTEMPTS),
            "initialBackoff": f"{self.first_pause}s",
            "maxBackoff": f"{self.longest_pause}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": _TRY_AGAIN,
        }


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to trust, and who one is. Without `authority` the system's; a certificate of one's own for mutual TLS."""

    authority: str | PathLike[str] | None = None  # PEM files, all of them
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """As gRPC takes them."""
        return grpc.ssl_channel_credentials(*(_read(path) for path in (self.authority, self.key, self.cert)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where to and how.

    Args:
        address: a host and port, several of them, or anything that gRPC resolves, as "dns:///pilotfish:50051". Where
            there are several servers behind it, calls go to each in turn.
        token: who calls, where the server asks for it.
        tls: None sends everything in the clear, the token too.
        retry: None tries once.
    """

    address: str | Sequence[str] = "127.0.0.1:50051"
    token: str | None = None
    tls: Tls | None = None
    retry: Retry | None = Retry()

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return self.address if isinstance(self.address, str) else f"ipv4:{','.join(self.address)}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Of the channel."""
        config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
        if self.retry is not None:
            config["methodConfig"] = [{"name": _RETRIED, "retryPolicy": self.retry.policy()}]
        service = [("grpc.service_config", json.dumps(config)), ("grpc.enable_retries", int(self.retry is not None))]
        return [*_RECONNECT, *_KEEPALIVE, *service]

    def channel(self) -> grpc.Channel:
        """For threads."""
        if self.tls is None:
            return grpc.insecure_channel(self.target, self.options)
        return grpc.secure_channel(self.target, self.tls.credentials(), self.options)

    def aio_channel(self) -> grpc.aio.Channel:
        """For asyncio."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.target, self.options)
        return grpc.aio.secure_channel(self.target, self.tls.credentials(), self.options)


def _read(path: str | PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
