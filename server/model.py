"""The model that is served: its engine, its tokenizer and its name, loaded together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.grammar import Grammar
from engine.text import Codec
from engine.types import Guided
from models import embedded_draft, embedded_target
from server.chat import ChatTemplate

if TYPE_CHECKING:
    from engine.engine import Engine

Progress = Callable[[str], None]
CompileGrammar = Callable[[Guided], Grammar]  # slow but bounded; any thread; raises InvalidRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that a request can use."""

    name: str
    draft_name: str | None
    device: str
    engine: Engine
    codec: Codec | None  # None: a checkpoint without a tokenizer serves token ids alone
    compile_grammar: CompileGrammar | None = None  # None: no structure can be asked for
    chat: ChatTemplate | None = None  # None: no conversations, only prompts

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress) -> ServedModel:
        """Load and warm up. Takes seconds to minutes: call it on the compute thread."""
        from engine.build import build_engine, pick_device
        from engine.calibrate import calibrate
        from engine.guided import GrammarCompiler

        engine = build_engine(config, progress)
        codec = Codec.load(config.target, config.revision)
        compiler = GrammarCompiler.of(codec, engine.vocab_size, engine.eos_token_ids, config)
        chat = None if codec is None else ChatTemplate.load(config.target, config.revision)
        progress("warming up")
        engine.warm_up()
        calibrate(engine, config.warm_up_seconds)
        draft_name = None if config.draft is None else model_name(config.draft)
        device = str(pick_device(config.device))
        return cls(
            model_name(config.target),
            draft_name,
            device,
            engine,
            codec,
            None if compiler is None else compiler.compile,
            chat,
        )


def model_name(source: str) -> str:
    """What clients call a model: its hub id, or the name of its folder, or what the embedded ones are called."""
    embedded = {str(embedded_target()): "pilotfish-embedded", str(embedded_draft()): "pilotfish-embedded-draft"}
    if source in embedded:
        return embedded[source]
    return Path(source).resolve().name if Path(source).is_dir() else source
