"""The command `pilotfish`: dispatch to its subcommands. A command imports heavy modules only when it needs them."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.engine.errors import shown
from pilotfish.server import version

if TYPE_CHECKING:
    from pilotfish.server.app import App
    from pilotfish.server.config import ServerConfig
    from pilotfish.server.worker.fork_server import ForkServer

logger = logging.getLogger(__name__)

USAGE = """usage: pilotfish COMMAND [OPTIONS]

LLM inference server with exact speculative decoding, over gRPC and HTTP.

commands:
  serve [MODEL] [--draft DRAFT]   serve a model; default: the embedded models
  chat                            talk to a chat model on a running server
  generate PROMPT                 answer or continue a prompt on a running server
  check [MODEL] [--draft DRAFT]   check whether this machine can serve a model
  bench [MODEL] [--draft DRAFT]   measure the speed-up of speculation on this machine
  health [ADDRESS]                check the health of a server; the exit code is the result
  verify [ADDRESS]                check that a running server's tokens depend only on the request
  train-draft [MODEL] --out DIR   train an EAGLE-3 head on text that the model generates
  quality [MODEL] [--text FILE]   compare a served model with float32 of its checkpoint
  quantize MODEL OUT              save a model with int8 or int4 weights to the folder OUT
  version                         print the version

`pilotfish COMMAND --help` lists the options of a command.
"""

PRINTING = ("check", "bench", "health", "verify", "train-draft", "quality")  # modules of `server.commands`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    command, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": serve, "chat": chat, "generate": generate, "quantize": quantize
    }  # fmt: skip
    if command in commands:
        return commands[command](rest)
    if command in PRINTING:
        return _printed(command, rest)
    if command == "version":
        print(f"pilotfish {version()}")
        return 0
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    print(f"pilotfish: unknown command {command!r}\n\n{USAGE}", end="", file=sys.stderr)
    return 2


def _problem(error: Exception) -> str:
    """Return the message, or a line per invalid option; the name of a file, which can have any length, is shortened."""
    from pydantic import ValidationError

    from pilotfish.server.config import problems

    if isinstance(error, OSError) and error.filename is not None:
        return f"{shown(str(error.filename))}: {error.strerror}"
    return "\n  ".join(problems(error)) if isinstance(error, ValidationError) else str(error)


def serve(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    from pilotfish.server.worker.fork_server import ForkServer

    started = list[ForkServer]()
    _stop_at_once(started)
    # The fork server starts first: its import of torch takes longer than everything below.
    with ForkServer() as forks:
        started.append(forks)
        from pydantic import ValidationError

        from pilotfish.engine.errors import ModelError
        from pilotfish.engine.machine.rank import RankInfo
        from pilotfish.server.chat import ChatTemplate, read_template
        from pilotfish.server.config import OptionError, ServerConfig

        try:
            config = ServerConfig.load(arguments)
            if config.chat_template is not None:
                ChatTemplate(read_template(config.chat_template), {})
            place = RankInfo.here()
            place.check(config.tensor_parallel_size)
        except (ValidationError, OptionError, OSError, ModelError) as error:
            print(f"pilotfish serve: {_problem(error)}", file=sys.stderr)
            return 2
        if place.leads:
            return _run(config, forks)
        forks.close()
        return _follow(config)


def _stop_at_once(started: list[ForkServer]) -> None:
    """Let SIGINT and SIGTERM end the server and what it has started, until the event loop handles them."""

    def stop(*_: object) -> None:
        for forks in started:
            forks.close()
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def chat(arguments: list[str]) -> int:
    """Talk to a chat model on a running server."""
    from pilotfish.client.terminal import chat

    return chat.main(arguments)


def generate(arguments: list[str]) -> int:
    """Generate text on a running server."""
    from pilotfish.client.terminal import generate

    return generate.main(arguments)


def _printed(name: str, arguments: list[str]) -> int:
    """Run a command and print the text it returns; the exit code is 0 or 1 by its result, 2 after one of `ERRORS`."""
    from pilotfish.server.commands.progress import Progress, Stopped, stoppable

    errors: tuple[type[Exception], ...] = ()
    try:
        with stoppable(), Progress() as progress:
            from pilotfish.server.config import OptionError

            module = import_module(f"pilotfish.server.commands.{name.replace('-', '_')}")
            errors = (OptionError, *module.ERRORS)
            text, is_good = module.run(arguments, progress)
    except Stopped as stop:
        if stop.report:
            print(stop.report)
        print(f"pilotfish {name}: stopped; {stop.kept}", file=sys.stderr)
        return stop.exit_code
    except errors as error:
        print(f"pilotfish {name}: {_problem(error)}", file=sys.stderr)
        return 2
    print(text)
    return 0 if is_good else 1


def quantize(arguments: list[str]) -> int:
    """Quantise a model's weights once and save them, so that the model loads quickly, from memory-mapped files."""
    parser = argparse.ArgumentParser(prog="pilotfish quantize", description=quantize.__doc__)
    parser.add_argument("model", help="a local folder or a Hugging Face hub id")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--revision", help="hub revision of the model; a commit pins it")
    parser.add_argument("--weights", choices=["int8", "int4"], default="int8", help="weight format (default: int8)")
    options = parser.parse_args(arguments)

    from pilotfish.engine.errors import ModelError
    from pilotfish.engine.model.quantize import save_quantised

    try:
        save_quantised(options.model, options.revision, options.out, options.weights)
    except (ModelError, OSError) as error:
        print(f"pilotfish quantize: {_problem(error)}", file=sys.stderr)
        return 1
    print(f"saved {options.model} with {options.weights} weights; serve it with `pilotfish serve {options.out}`")
    return 0


def _run(config: ServerConfig, forks: ForkServer) -> int:
    from pilotfish.server.worker.garbage import importing, map_large_blocks, settle

    with importing():
        import uvloop

        from pilotfish.server.app import App
        from pilotfish.server.telemetry import logs
        from pilotfish.server.worker.remote import RemoteEngine

    def be_ready(app: App) -> None:
        settle()
        _show_banner(app)

    logs.configure(config.log_format)
    map_large_blocks()
    try:
        app = App(config, RemoteEngine(config, forks=forks), on_ready=be_ready)
    except (ValueError, OSError) as error:  # for example an invalid token file
        print(f"pilotfish serve: {_problem(error)}", file=sys.stderr)
        return 1
    try:
        return uvloop.run(app.run())
    except* OSError as errors:  # the port is already in use
        print(f"pilotfish serve: {errors.exceptions[0]}", file=sys.stderr)
    return 1


def _follow(config: ServerConfig) -> int:
    """Run a shard of the target for the server of rank 0, without front ends, until that server ends."""
    from pilotfish.engine.errors import ModelError, RankLost
    from pilotfish.engine.startup.build import load_shard
    from pilotfish.server.telemetry import logs

    logs.configure(config.log_format)
    try:
        follow = load_shard(config.engine(), lambda stage: logger.info("%s", stage))
    except (ModelError, RankLost) as error:
        logger.error("cannot load a shard of %s: %s", config.target, error)  # noqa: TRY400  # expected
        return 1
    # torchrun sends these signals to all ranks. Rank 0 drains, and needs this shard until it has finished.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow()
    return 0


def _show_banner(app: App) -> None:
    """Show addresses and models: as a table on a terminal, else as one log record."""
    from pilotfish.server.telemetry.logs import CLEAR_LINE, is_json

    lines = banner(app)
    if is_json(app.config.log_format) or not sys.stderr.isatty():
        logger.info("ready", extra={"fields": {name.lower().replace("/", ""): value for name, value in lines}})
        return
    from rich.console import Console
    from rich.table import Table

    sys.stderr.write(CLEAR_LINE)  # of the progress
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(f"[bold cyan]{name}", value)
    Console(stderr=True).print(grid)


def banner(app: App) -> list[tuple[str, str]]:
    """Return the lines of the banner as (name, value) pairs."""
    assert app.driver is not None, "a banner before the model"
    model, config = app.driver.model, app.config
    engine = model.engine
    drafts = "off" if config.speculation == "off" else f"{config.speculation}, K up to {config.num_draft_tokens}"
    return [
        ("pilotfish", version()),
        ("gRPC", f"{config.host}:{app.grpc_port}"),
        ("HTTP", f"http://{config.host}:{app.http_port}"),
        ("model", model.name),
        ("drafts", f"{model.draft_name or model.engine.facts.default_proposer} ({drafts})"),
        (
            "K/V",
            f"{engine.facts.total_pages} pages" + (f", {config.kv_memory:g} GiB at most" if config.kv_memory else ""),
        ),
        ("loop", engine.facts.loop),
        (
            "device",
            f"{model.device}, {engine.facts.dtype}"
            + ("" if config.weights == "native" else f", {config.weights} weights"),
        ),
    ]
