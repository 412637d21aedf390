"""An engine's own process around the fake engine, in which a prompt's last token can ask for an accident."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pilotfish.engine.errors import ModelError
from pilotfish.engine.stats import CacheChange
from pilotfish.engine.text import guided
from pilotfish.server.worker import engine_process
from tests.engine.text.test_codec import CODEC, VOCAB_SIZE
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.fake_grammar import FakeCompiler

PROGRAM = "from tests.server.worker.fake_child import main; main()"
KILL, EXIT, RAISE, HANG, GARBAGE, SLOW = range(100, 106)


def _write(data: bytes) -> None:
    os.write(int(sys.argv[1]), data)


ACCIDENTS = {
    KILL: lambda: os.kill(os.getpid(), signal.SIGKILL),
    EXIT: lambda: os._exit(3),
    RAISE: lambda: 1 / 0,
    HANG: lambda: time.sleep(1000),
    GARBAGE: lambda: _write(b"\0\0\0\3abc"),
    SLOW: lambda: time.sleep(0.005),
}


class AccidentProne(FakeEngine):
    """Has the accident in its third step with the request."""

    calibration_text = None  # until it is told

    def idle_tick(self, is_wanted=None):
        """Where the target is a folder with `calibrating` in it, calibrate until an order comes."""
        sign = Path(self.config.target) / "calibrating"
        if is_wanted is None or not sign.exists():
            return False
        sign.write_text("now")
        while not is_wanted():
            time.sleep(0.001)
        return True

    def step(self):
        for outputs in list(self._live.values()):
            for output in outputs.values():
                if len(output.tokens) > self._burst and output.request.token_ids[-1] in ACCIDENTS:
                    ACCIDENTS[output.request.token_ids[-1]]()
        return super().step()


class CacheTelling(AccidentProne):
    """Tells who watches that it has cached the first page of each prompt."""

    _changes: list[CacheChange] | None = None

    @property
    def pages(self):
        return self

    def watch(self):
        self._changes = []

    def take_changes(self):
        taken, self._changes = self._changes, []
        return tuple(taken)

    def add(self, request):
        if self._changes is not None:
            page = request.token_ids[: self.page_size]
            self._changes.append(CacheChange(len(self.requests), salt=(request.cache_salt, 0), tokens=page))
        return super().add(request)


def load(config, progress, *, is_successor=False):
    """Load a fake. A model `none` there is not; where the target is a file, the first successor hangs.

    Where it is a folder, each load is killed that finds a number in it, which it takes away; with `text` in it, it is
    waited for that the front ends have read theirs; with `compiled` in it, structures are compiled as usual and
    counted. `broken` cannot be loaded.
    """
    if config.target == "none":
        raise ModelError("no such model")
    if config.target == "broken":
        raise RuntimeError("out of memory")
    while (Path(config.target) / "text").exists():
        time.sleep(0.001)
    for deadly in Path(config.target).glob("[0-9]"):
        deadly.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    hangs = Path(config.target)
    if is_successor and hangs.is_file():
        hangs.unlink()
        time.sleep(1000)
    progress("loading a fake")
    engine = CacheTelling(batch=min(config.max_batch_size, 8))
    engine.config = config
    for name, folder in config.adapter.items():
        engine.adapters.load(name, Path(folder))
    engine.poison = {99}
    return engine


def make_compiler(_engine, config):
    """A fake one, or where each structure is counted the usual one, which writes the regex of each into the file."""
    compiled, compile_one = Path(config.target) / "compiled", guided._compile
    if not compiled.exists():
        return FakeCompiler()

    def counted(vocabulary, structure):
        with compiled.open("a") as file:
            file.write(f"{structure.regex}\n")
        return compile_one(vocabulary, structure)

    guided._compile = counted
    return guided.GrammarCompiler(CODEC, VOCAB_SIZE, [EOS])


def main() -> None:
    """The process."""
    engine_process.main(load, make_compiler)
