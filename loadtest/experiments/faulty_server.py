"""A server with injected faults for requests that select them (`python -m loadtest.experiments.faulty_server`).

The server itself has no option to fail, so this module replaces parts of it from outside. A request whose id or prompt
contains `fault-PART` fails in that part. The engine runs in its own process, as with `pilotfish serve`, and checks its
invariants whenever it is idle. On SIGUSR1 the process prints a line of JSON that lists its resources.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from pilotfish.engine import target_pass
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.text.codec import Codec
from pilotfish.server.app import App
from pilotfish.server.config import ServerConfig
from pilotfish.server.grpc import messages
from pilotfish.server.model import Progress
from pilotfish.server.streams import stream
from pilotfish.server.telemetry import logs
from pilotfish.server.worker import engine_process
from pilotfish.server.worker.fork_server import ForkServer
from pilotfish.server.worker.remote import RemoteEngine

if TYPE_CHECKING:
    from pilotfish.engine.engine import Engine

MARK = "fault-"  # followed by the name of a part
ENGINE = "from loadtest.experiments.faulty_server import run_engine; run_engine()"
FIRST_TOKENS = 4  # a fault in the engine is raised after this number of tokens, when there is output to lose


class Injected(RuntimeError):
    """Expected: an injected fault."""


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the attribute `name` of `owner` with `make(attribute)`."""
    setattr(owner, name, make(getattr(owner, name)))


def _asks_for(part: str, sequence: Any) -> bool:
    return MARK + part in sequence.request_id and sequence.num_generated >= FIRST_TOKENS


def _in_tokenizer(encode: Any) -> Any:
    def faulty(self: Codec, text: str, **options: Any) -> Any:
        if MARK + "tokenizer" in text:
            raise Injected("tokenizer")
        return encode(self, text, **options)

    return faulty


def _in_target(run: Any) -> Any:
    def faulty(self: Any, works: Any, watch: Any) -> Any:
        if any(_asks_for("target", work.sequence) for work in works):
            raise Injected("target")
        return run(self, works, watch)

    return faulty


def _not_a_number(verify_rows: Any) -> Any:
    def faulty(fed: Any, logits: Any) -> Any:
        first = 0
        for one in fed:
            if _asks_for("nan", one.sequence):
                logits[first : first + one.num_rows] = math.nan
            first += one.num_rows
        return verify_rows(fed, logits)

    return faulty


def _in_text(push: Any) -> Any:
    def faulty(self: stream.OutputStream, event: Any) -> Any:
        if MARK + "text" in self.request_id:
            raise Injected("text")
        return push(self, event)

    return faulty


def _in_answers(make: Any) -> Any:
    def faulty(event: Any, request: Any) -> Any:
        if MARK + "answers" in request.request_id:
            raise Injected("answers")
        return make(event, request)

    return faulty


def _in_draft(propose: Any) -> Any:
    def faulty(sequences: Any, k_each: Any) -> Any:
        if any(_asks_for("draft", sequence) for sequence in sequences):
            raise Injected("draft")
        return propose(sequences, k_each)

    return faulty


def run_engine() -> None:
    """Run the engine's process, with faults in the engine."""
    engine_process.main(load)


def load(config: EngineConfig, progress: Progress, *, is_successor: bool = False) -> Engine:
    """Load the engine as the server does, then make it faulty."""
    engine = engine_process.load_engine(config, progress, is_successor=is_successor)
    replace(target_pass.TargetPass, "_pass", _in_target)
    replace(target_pass, "verify_rows", _not_a_number)
    for proposer in engine.proposers.by_name.values():
        replace(proposer, "propose", _in_draft)
    replace(engine, "idle_tick", partial(_after_a_check, engine))
    return engine


def _after_a_check(engine: Engine, idle_tick: Any) -> Any:
    def checked(*wanted: Any) -> Any:
        engine.check_invariants()  # an AssertionError ends the process, and the number of restarts is then wrong
        return idle_tick(*wanted)

    return checked


def census(app: App) -> dict[str, Any]:
    """Return the resources of this process, and the pages of the engine as last reported."""
    assert app.driver is not None, "asked before it was ready"
    gc.collect()
    engine = app.driver.model.engine
    return {
        "tasks": len(asyncio.all_tasks()),
        "live": len(app.driver.live()),
        "queued": len(app.driver.queue),
        "free_pages": engine.load.free_pages,
        "total_pages": engine.facts.total_pages,
        "objects": len(gc.get_objects()),
    }


def main() -> int:
    """Serve, as `pilotfish serve` does with the same options."""
    config = ServerConfig.load(sys.argv[1:])
    logs.configure(config.log_format)
    replace(Codec, "encode", _in_tokenizer)
    replace(stream.OutputStream, "push", _in_text)
    replace(messages, "_of_event", _in_answers)
    app = App(config, RemoteEngine(config, start_forks=partial(ForkServer, ENGINE)), on_ready=_listen)
    return uvloop.run(app.run())


def _listen(app: App) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: print(json.dumps(census(app)), flush=True))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PilotfishError as problem:
        sys.exit(str(problem))
