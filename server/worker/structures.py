"""Compilation of structures in the engine's process, on threads beside its steps. Knows no socket and no engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.errors import GrammarFault, InvalidRequest, Unsupported
from engine.params import Guided
from engine.types import GRAMMAR_TOKENS, Grammar
from server.worker import wire

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.text.guided import GrammarCompiler

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2
# For a structure that was compiled in time before: that this process is busier now must not end its request.
AGAIN_SECONDS = 300.0


class Structures:
    """Threads that compile, for callers who wait for an answer, and for requests whose structure is not kept."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        """`make` is called for the first structure: it reads a tokenizer, which takes time and memory."""
        self._make, self._making = make, threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="structure")

    def ready(self, guided: Guided) -> Grammar | None:
        """Return the grammar if it is compiled and kept; at once."""
        return None if self._compiler is None else self._compiler.ready(guided)

    def again(self, guided: Guided) -> Future[Grammar]:
        """Compile what was compiled before: it is not kept any more, or an earlier engine has compiled it."""
        return self._threads.submit(lambda: self._made().compile(guided, AGAIN_SECONDS))

    def answer(self, asked: wire.Compile, send: Callable[[wire.Compiled], None]) -> None:
        """Compile, check the tokens, and `send` the answer, on another thread."""
        self._threads.submit(lambda: send(self._compiled(asked)))

    def _compiled(self, asked: wire.Compile) -> wire.Compiled:
        try:
            require_fit(asked.received, self._made().compile(asked.guided))
        except InvalidRequest as invalid:
            return wire.Compiled(asked.order, invalid.violations)
        except Unsupported as error:
            return wire.Compiled(asked.order, unsupported=str(error))
        except Exception:
            logger.exception("a structure could not be compiled")
            return wire.Compiled(asked.order, is_fault=True)
        return wire.Compiled(asked.order)

    def _made(self) -> GrammarCompiler:
        with self._making:
            self._compiler = self._compiler or self._make()
        return self._compiler


def compiler_of(engine: Engine, config: EngineConfig) -> GrammarCompiler:
    """Make the compiler of a loaded engine, with a tokenizer of its own."""
    from engine.text.codec import Codec
    from engine.text.guided import GrammarCompiler

    codec = Codec.load(config.target, config.revision)
    assert codec is not None, "the front ends refuse structures of a model that has no tokenizer"
    return GrammarCompiler(codec, engine.vocab_size, engine.eos_token_ids, config)


def require_fit(received: Sequence[Sequence[int]], grammar: Grammar) -> None:
    """Check that the tokens that were received of each output have the structure. Raises InvalidRequest."""
    for index, tokens in enumerate(received):
        field, state = f"resume.outputs[{index}].token_ids", grammar.start()
        for start in range(0, len(tokens), GRAMMAR_TOKENS):
            part = tokens[start : start + GRAMMAR_TOKENS]
            try:
                taken = state.advance(part)
            except GrammarFault as fault:
                raise InvalidRequest.of(field, str(fault)) from fault
            if taken < len(part):
                raise InvalidRequest.of(
                    f"{field}[{start + taken}]", f"is {part[taken]}, which does not fit the structure"
                )
