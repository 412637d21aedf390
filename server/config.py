"""Every option of `pilotfish serve`. Flags, `PILOTFISH_*` variables and the keys of the file are made from it."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from engine.config import EngineConfig, ModelName, can_be_opened
from models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target

LogFormat = Literal["auto", "json", "text"]
FileName = Annotated[Path, AfterValidator(can_be_opened)]
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# All proposers of the embedded target. Together they load in less than a second.
_EMBEDDED = {
    "draft": str(embedded_draft()),
    "medusa": str(embedded_medusa()),
    "eagle": str(embedded_eagle()),
    "self_layers": 3,
}


class ServerConfig(BaseSettings, EngineConfig):
    """Serve a model over gRPC and HTTP. Every option is also a PILOTFISH_* variable and a key of the --config file."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="PILOTFISH_",
        cli_prog_name="pilotfish serve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    target: CliPositionalArg[ModelName] = Field(
        "", description="Target model: a local folder or a Hugging Face hub id; none serves the embedded pair."
    )
    config: Path | None = Field(None, description="YAML or TOML file with any of these options.")
    host: str = Field("127.0.0.1", description="Address to listen on, for gRPC and HTTP.")
    grpc_port: int = Field(50051, ge=0, le=65535, description="Port of gRPC; 0 takes a free one.")
    http_port: int = Field(8000, ge=0, le=65535, description="Port of HTTP; 0 takes a free one.")
    max_queue_requests: int = Field(
        256, ge=1, description="Most requests waiting to be admitted; of several callers each may have an equal part."
    )
    max_queue_tokens: int = Field(131072, ge=1, description="Most tokens of prompt and output waiting together.")
    max_queue_seconds: float = Field(
        10.0,
        ge=0,
        description="Longest wait in the queue by estimate, in seconds, or a tenth of the time that requests now take, "
        "if that is longer; about 0.5 where people wait at a screen.",
    )
    ageing_seconds: float = Field(
        1.0, gt=0, description="Seconds of waiting in the queue that are worth as much as one step of priority."
    )
    drain_seconds: float = Field(30.0, ge=0, description="How long live streams may go on after SIGTERM, in seconds.")
    hang_seconds: float = Field(
        120.0, gt=0, description="How long one step of the engine may take before it is given up, in seconds."
    )
    standby: bool = Field(
        False,
        description="Keep a second engine loaded, which takes over at once when the first one fails. It needs memory "
        "for weights that are not mapped from files, and for keys and values once it serves; on a GPU each of the two "
        "takes half.",
    )
    max_engine_crashes: int = Field(
        5,
        ge=0,
        description="How often the engine may fail and be restarted within crash_window_seconds; then the exit.",
    )
    crash_window_seconds: float = Field(300.0, gt=0, description="The time over which max_engine_crashes counts.")
    stall_seconds: float = Field(30.0, gt=0, description="How long a reader may take no message, in seconds.")
    max_message_bytes: int = Field(4 << 20, ge=1024, description="Largest message or body taken, in bytes.")
    max_header_bytes: int = Field(16 << 10, ge=4096, description="Most bytes of a call's metadata or headers.")
    body_seconds: float = Field(30.0, gt=0, description="How long an HTTP request may take to arrive, in seconds.")
    token_file: FileName | None = Field(
        None, description="File of lines NAME TOKEN, one for each caller; default no token is asked for."
    )
    max_requests_per_token: int | None = Field(
        None, ge=1, description="Most live requests of one caller; one for n outputs counts as n."
    )
    requests_per_second: float | None = Field(
        None, gt=0, description="Most requests that one caller begins per second; one for n outputs counts as n."
    )
    tls_cert: FileName | None = Field(None, description="Certificate chain (PEM) of gRPC and HTTP; default no TLS.")
    tls_key: FileName | None = Field(None, description="Its private key (PEM).")
    tls_client_ca: FileName | None = Field(
        None, description="Certificates (PEM) of who signs clients' certificates; with it, every client needs one."
    )
    keepalive_seconds: float = Field(30.0, gt=0, description="Silence after which a gRPC client is pinged.")
    max_streams_per_connection: int = Field(1024, ge=1, description="Most live calls on one gRPC connection.")
    max_connection_seconds: float | None = Field(
        None, gt=0, description="Age at which a gRPC client is asked to connect anew, so that it finds new replicas."
    )
    chat_format: str | None = Field(
        None,
        description="How the model writes calls of functions: hermes, qwen_coder, glm, llama, mistral, gemma, "
        "deepseek, harmony or plain; default what its chat template shows.",
    )
    playground: bool = Field(True, description="Serve a page at / that shows tokens as they stream.")
    reflection: bool = Field(False, description="Let gRPC clients list the services (reflection).")
    tracing: bool = Field(
        False,
        description="Export a span per request (OpenTelemetry; extra otel; OTEL_* variables say where).",
    )
    vllm_metrics: bool = Field(
        False, description="Export metrics under vLLM's names, too, for dashboards and autoscalers that know those."
    )
    adapter_root: FileName | None = Field(
        None,
        description="Folder below which operators may load adapters by a call while the server runs; default no call "
        "loads or unloads any.",
    )
    kv_events_endpoint: str | None = Field(
        None,
        description="Where to publish what the prefix cache holds, for routers that use vLLM's K/V events: "
        "tcp://ADDRESS:PORT, for example tcp://*:5556 (extra kv-events). The events contain the tokens of prompts.",
    )
    kv_events_replay_endpoint: str | None = Field(
        None, description="Where routers can ask for earlier K/V events again, for example tcp://*:5557."
    )
    kv_events_topic: str | None = Field(
        None, description="Topic of the K/V events, kv@POD@MODEL; default the name of this machine and of the model."
    )
    log_format: LogFormat = Field("auto", description="Form of the log; auto is text on a terminal, else json.")

    @model_validator(mode="before")
    @classmethod
    def _embedded_pair(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("target"):
            shared = str(values.get("tensor_parallel_size", 1)) != "1"
            parts = {**_EMBEDDED, "self_layers": None} if shared else _EMBEDDED  # they need an unsharded target
            return parts | values | {"target": str(embedded_target())}
        return values

    @model_validator(mode="after")
    def _serving_options_fit(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("TLS needs both tls_cert and tls_key, and tls_client_ca needs them too")
        if (self.max_requests_per_token or self.requests_per_second) and self.token_file is None:
            raise ValueError("max_requests_per_token and requests_per_second are of tokens; they need a token_file")
        if self.standby and self.tensor_parallel_size > 1:
            raise ValueError(f"standby is not supported with tensor_parallel_size {self.tensor_parallel_size}")
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(self, name) is not None and self.kv_events_endpoint is None:
                raise ValueError(f"{name} is of K/V events; they need a kv_events_endpoint")
        if self.kv_events_endpoint is not None and not self.prefix_cache:
            raise ValueError("kv_events_endpoint needs the prefix cache, whose changes are the events")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags have precedence over variables, and these over the file, which `load` names in `model_config`."""
        files = TomlConfigSettingsSource(settings_cls), YamlConfigSettingsSource(settings_cls)
        return init_settings, env_settings, *files

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        """Read flags, variables and the file that one of them names, in this order of precedence."""
        flags: CliSettingsSource[Any] = CliSettingsSource(cls, cli_parse_args=list(arguments))
        path = flags().get("config") or os.environ.get("PILOTFISH_CONFIG")
        if not path:
            return CliApp.run(cls, cli_args=list(arguments))
        try:
            can_be_opened(Path(path))
        except ValueError as error:
            raise FileNotFoundError(f"config {error}") from None
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no configuration file {path}")
        is_toml = Path(path).suffix == ".toml"

        class WithFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=path) if is_toml else SettingsConfigDict(yaml_file=path)

        return CliApp.run(WithFile, cli_args=list(arguments))

    @classmethod
    def load_with(
        cls, command: str, about: str, own: dict[str, dict[str, Any]], arguments: Sequence[str]
    ) -> tuple[Namespace, Self]:
        """Read the options of a command, each with arguments of argparse, and those of the server."""
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        for name, told in own.items():
            parser.add_argument(f"--{name}", **told)
        mine, others = parser.parse_known_args(arguments)

        class CommandConfig(cls):  # type: ignore[valid-type, misc]
            __doc__ = about
            model_config = SettingsConfigDict(cli_prog_name=f"pilotfish {command}")

        return mine, CommandConfig.load(others)

    def engine(self) -> EngineConfig:
        options = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return EngineConfig(**options | {"engines_per_device": self.engines_per_device * (1 + self.standby)})
