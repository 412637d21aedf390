"""An engine on a thread of the test's process, where a test can reach it, behind the methods of `RemoteEngine`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from pilotfish.engine.startup import warm
from pilotfish.engine.stats import StepOutput
from pilotfish.engine.text.codec import structure_problem
from pilotfish.engine.text.guided import GrammarCompiler
from pilotfish.engine.types import FinishReason
from pilotfish.server.errors import EngineHung
from pilotfish.server.model import ServedModel, read_text
from pilotfish.server.worker.engine_process import require_fit


class InProcess:
    """Steps on one thread; all other changes of the engine happen between two steps, at once.

    `load` returns a `ServedModel` whose `compile_grammar` turns a structure into a grammar. An engine that is restarted
    is the same one, emptied.
    """

    pid = None

    def __init__(self, load, config):
        self._load, self._config = load, config
        self._watches_cache = config.kv_events_endpoint is not None
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        self._grammars = {}
        self._ended = []  # events of ordered ends, not yet returned by a turn

    @property
    def has_work(self):
        return self.engine.has_work or bool(self._ended)

    async def start(self, progress):
        model = await self._computed(self._load, self._config.engine(), progress)
        self.engine, self._compile = model.engine, model.compile_grammar
        self._watch()
        return replace(model, compile_grammar=None if self._compile is None else self.compile)

    async def compile(self, guided, received=()):
        def compiled():
            grammar = self._compile(guided)
            require_fit(received, grammar)
            return grammar

        loop = asyncio.get_running_loop()
        self._grammars[guided] = await loop.run_in_executor(self._compilers, compiled)

    def add(self, request):
        guided = request.sampling.guided
        self._ended += self.engine.add(replace(request, grammar=None if guided is None else self._grammars[guided]))

    def finish(self, request_id, reason, index=None, keep=None):
        self._ended += self.engine.finish(request_id, reason, index=index, keep=keep)

    def drop(self, request_id, reason):
        self.engine.finish(request_id, reason)
        self._ended = [event for event in self._ended if event.request_id != request_id]

    async def load_adapter(self, name, folder):
        return (await self._computed(self.engine.adapters.load, name, Path(folder))).fingerprint

    def unload_adapter(self, name):
        self.engine.adapters.unload(name)

    async def turn(self, wake):
        if self._ended:
            ended, self._ended = tuple(self._ended), []
            return StepOutput(ended, None, self.engine.load)
        if not self.engine.has_work:
            await wake.wait()
            wake.clear()
            return None
        step = self._computed(self.engine.step)
        await asyncio.wait((step,), timeout=self._config.hang_seconds)
        if not step.done():
            step.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise EngineHung("a step does not end")
        changes = self.engine.pages.take_changes() if self._watches_cache else ()
        return step.result()._replace(cache_changes=changes)

    async def restart(self):
        self._ended = []
        recover = getattr(self.engine, "recover", lambda: self.engine.finish_all(FinishReason.ERROR))
        await self._computed(recover)
        self._watch()

    async def close(self):
        for threads in (self._compute, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _watch(self):
        if self._watches_cache:
            self.engine.pages.watch()

    def _computed(self, work, *args):
        return asyncio.get_running_loop().run_in_executor(self._compute, work, *args)


def around(engine, config, codec, chat):
    """The model that is served around an engine of this process."""
    sizes = engine.facts.limits.vocab_size, tuple(engine.facts.limits.eos_token_ids)
    has_none = structure_problem(codec, *sizes)
    compiled = None if has_none else GrammarCompiler(codec, *sizes, config).compile
    return ServedModel.around(engine, compiled, config, codec, chat)


def load_models(config, progress):
    """Load the models that `config` names."""
    return around(warm.load(config, progress), config, *read_text(config))
