"""Connections to servers: addresses, balancing, retries, TLS and token. This module makes no calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import grpc

# Retry the connection to a server that is not up yet within a second. The default of gRPC allows two minutes.
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))
# Detects servers whose machine has disappeared. Servers reject more frequent pings.
_KEEPALIVE = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))
MAX_ATTEMPTS = 5  # the maximum in gRPC
# CANCELLED is included because gRPC reports it for calls that reach a server during its shutdown (grpc/grpc#41785).
# A call that its own caller cancels has already ended, so it is never retried.
_TRY_AGAIN = ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"]
_RETRIED = [{"service": "pilotfish.v1.InferenceService"}, {"service": "pilotfish.v1.ControlService"}]


@dataclass(frozen=True, slots=True)
class Retry:
    """Limits on retries. Nothing is delivered twice.

    The pause before an attempt is the server's retry delay, or else grows from `first_pause` to `longest_pause`, in
    seconds.

    Args:
        attempts: Maximum number of times that gRPC sends a call that has received nothing.
        resume_attempts: Maximum number of attempts to resume an interrupted stream; it is renewed whenever something
            arrives. Also limits the attempts of a request that has received nothing, while servers are starting or
            shutting down. The default lasts for at least half a minute.
    """

    attempts: int = 4
    first_pause: float = 0.2
    longest_pause: float = 5.0
    resume_attempts: int = 12

    def policy(self) -> dict[str, Any]:
        """Return the retry policy in the form of a gRPC service config."""
        return {
            "maxAttempts": min(self.attempts, MAX_ATTEMPTS),
            "initialBackoff": f"{self.first_pause}s",
            "maxBackoff": f"{self.longest_pause}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": _TRY_AGAIN,
        }


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificates for TLS.

    Without `authority`, the system's CA certificates are used. `cert` and `key` are required for mutual TLS.
    """

    authority: str | PathLike[str] | None = None  # all three are paths of PEM files
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials as a gRPC object."""
        return grpc.ssl_channel_credentials(*(_read(path) for path in (self.authority, self.key, self.cert)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The addresses of the servers and the settings of the connection.

    Args:
        address: A host and port, several of them, or any name that gRPC resolves, such as "dns:///pilotfish:50051". If
            the address resolves to several servers, calls go to each of them in turn.
        token: The access token, if the server requires one.
        tls: None sends everything unencrypted, including the token.
        retry: None sends each call once.
    """

    address: str | Sequence[str] = "127.0.0.1:50051"
    token: str | None = None
    tls: Tls | None = None
    retry: Retry | None = Retry()

    @property
    def target(self) -> str:
        """Return the address in the form that gRPC expects."""
        return self.address if isinstance(self.address, str) else f"ipv4:{','.join(self.address)}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that every call carries."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Return the options of the channel."""
        config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
        grpc_retries = self.retry is not None and self.retry.attempts > 1
        if self.retry is not None and grpc_retries:
            config["methodConfig"] = [{"name": _RETRIED, "retryPolicy": self.retry.policy()}]
        service = [("grpc.service_config", json.dumps(config)), ("grpc.enable_retries", int(grpc_retries))]
        return [*_RECONNECT, *_KEEPALIVE, *service]

    def channel(self) -> grpc.Channel:
        """Return a channel for blocking calls from threads."""
        if self.tls is None:
            return grpc.insecure_channel(self.target, self.options)
        return grpc.secure_channel(self.target, self.tls.credentials(), self.options)

    def aio_channel(self) -> grpc.aio.Channel:
        """Return a channel for asyncio."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.target, self.options)
        return grpc.aio.secure_channel(self.target, self.tls.credentials(), self.options)


def _read(path: str | PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
