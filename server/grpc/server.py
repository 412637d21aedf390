"""The gRPC front end: its options, interceptors, credentials and port. Knows no service."""

from __future__ import annotations

import grpc

from server.admission.security import Callers
from server.admission.slow_work import SlowWork
from server.config import ServerConfig
from server.grpc.boundary import Boundary

PING_TIMEOUT_SECONDS = 10  # for the answer to a ping
MIN_PING_SECONDS = 10  # a client that pings more often is disconnected


def make_server(config: ServerConfig, callers: Callers, slow: SlowWork) -> grpc.aio.Server:
    """Create a server without services that does not listen yet."""
    return grpc.aio.server(interceptors=[Boundary(callers, slow)], options=_options(config))


def listen(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Open the port and return its number. Raises OSError if the port cannot be opened."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    address, credentials = f"{host}:{config.grpc_port}", _credentials(config)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    options = {
        "grpc.so_reuseport": 0,  # else a second server could open the same port without an error
        "grpc.max_receive_message_length": config.max_message_bytes,
        "grpc.max_metadata_size": config.max_header_bytes,
        "grpc.absolute_max_metadata_size": config.max_header_bytes,
        "grpc.max_concurrent_streams": config.max_streams_per_connection,
        # If a client's machine disappears, the connection is not closed: pings detect this, and its requests end.
        "grpc.keepalive_time_ms": round(1000 * config.keepalive_seconds),
        "grpc.keepalive_timeout_ms": 1000 * PING_TIMEOUT_SECONDS,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        # The documented option `min_recv_ping_interval...` has no effect.
        "grpc.http2.min_ping_interval_without_data_ms": 1000 * MIN_PING_SECONDS,
    }
    if config.max_connection_seconds is not None:
        # Without a grace period live streams may finish; only new calls need a new connection.
        options["grpc.max_connection_age_ms"] = round(1000 * config.max_connection_seconds)
    return list(options.items())


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return the TLS credentials; None without TLS."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    authority = None if config.tls_client_ca is None else config.tls_client_ca.read_bytes()
    pair = config.tls_key.read_bytes(), config.tls_cert.read_bytes()
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
