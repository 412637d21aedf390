"""The model that is served: its engine, its tokenizer and its name, loaded together."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.gguf.container import open_gguf
from pilotfish.engine.params import Guided, SpeculationSettings
from pilotfish.engine.request.intake import EngineFacts
from pilotfish.engine.stats import EngineLoad
from pilotfish.engine.text.codec import Codec, structure_problem
from pilotfish.engine.types import Adapter, Request
from pilotfish.models import embedded_draft, embedded_target
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.base import ChatFormat
from pilotfish.server.formats.detect import detect
from pilotfish.server.formats.reasoning import PlainFormat


class EngineView(Protocol):
    """What an engine reports; the same attributes as `Engine`."""

    config: EngineConfig
    facts: EngineFacts

    @property
    def adapters(self) -> Mapping[str, Adapter]: ...
    @property
    def load(self) -> EngineLoad: ...
    @property
    def has_room(self) -> bool: ...

    def speculation_of(self, request: Request) -> SpeculationSettings: ...
    def check(self, request: Request) -> None: ...  # raises InvalidRequest or Unsupported like the engine


log = logging.getLogger(__name__)

PLAIN = PlainFormat()
Progress = Callable[[str], None]
# Compiles a structure and checks the tokens received of each output: `RemoteEngine.compile`.
CompileGrammar = Callable[[Guided, Sequence[tuple[int, ...]]], Awaitable[None]]


def read_text(config: EngineConfig) -> tuple[Codec | None, ChatTemplate | None]:
    """Load tokenizer and chat template, without the engine. Raises ModelError if they cannot be used."""
    codec = Codec.load(config.target, config.revision)
    if codec is None:
        return None, None
    _ = codec.longest_token  # so that the first request does not wait for it
    return codec, ChatTemplate.load(config.target, config.revision)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model: its engine, tokenizer, chat template, call format and fingerprint."""

    name: str
    draft_name: str | None
    device: str
    engine: EngineView
    codec: Codec | None  # None: the checkpoint has no tokenizer, so requests and answers contain only token ids
    compile_grammar: CompileGrammar | None = None  # None: guided decoding is not available
    chat: ChatTemplate | None = None  # None: the model accepts prompts, but no conversations
    format: ChatFormat = PLAIN  # notation of reasoning and calls
    fingerprint: str = ""  # identifies everything besides the request on which tokens depend (`fingerprint.py`)

    @classmethod
    def around(
        cls, engine: EngineView, compile_grammar: CompileGrammar, config: EngineConfig, codec: Codec | None,
        chat: ChatTemplate | None,
    ) -> ServedModel:  # fmt: skip
        """Assemble the model of a loaded engine; `compile_grammar` compiles structures for guided decoding."""
        if problem := structure_problem(
            codec, engine.facts.limits.vocab_size, tuple(engine.facts.limits.eos_token_ids)
        ):
            log.info("guided decoding is not available: %s", problem)
        draft_name = ", ".join(map(model_name, config.draft)) or None
        return cls(
            model_name(config.target),
            draft_name,
            engine.facts.device,
            engine,
            codec,
            None if problem else compile_grammar,
            chat,
            PLAIN if chat is None or codec is None else detect(chat.source, codec.added_tokens),
            fingerprint(config, engine.facts.dtype),
        )

    def fingerprint_with(self, adapter: str | None) -> str:
        """Return the fingerprint for requests with this adapter."""
        if adapter is None:
            return self.fingerprint
        both = f"{self.fingerprint} {self.engine.adapters[adapter].fingerprint}"
        return hashlib.blake2b(both.encode(), digest_size=8).hexdigest()

    def with_format(self, name: str) -> ServedModel:
        """Return the same model with the chat format of this name. Raises ModelError if there is no such format."""
        source = None if self.chat is None else self.chat.source
        return replace(self, format=detect(source, {} if self.codec is None else self.codec.added_tokens, name))


def model_name(source: str) -> str:
    """Return the name that clients use: the hub id, the name of the folder or file, or that of an embedded model."""
    embedded = {str(embedded_target()): "pilotfish-embedded", str(embedded_draft()): "pilotfish-embedded-draft"}
    if source in embedded:
        return embedded[source]
    return Path(source).resolve().name if Path(source).exists() else source


VERSION = 1  # increase it when sampling changes for the same logits, seed and position
_WHOLE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
_SAMPLE = 4096  # bytes sampled from each part of a weight file
_PART, _MOST_PARTS = 1 << 20, 2048  # minimum bytes of a part; maximum parts of a file


def fingerprint(config: EngineConfig, dtype: str) -> str:
    """Return 16 hexadecimal digits that depend on the target's files and on the types of weights, activations and K/V.

    Small files are read whole, weights are sampled: 4 KiB of each MiB, fewer of large files. Drafts are not included,
    nor is the machine: float results of different CPUs or GPUs may differ in the last bits.
    """
    kept = "" if config.kv_cache_dtype == "auto" else f" {config.kv_cache_dtype}"
    digest = hashlib.blake2b(f"{VERSION} {config.weights} {dtype}{kept}".encode(), digest_size=8)
    gguf = open_gguf(config.target, config.revision)
    if gguf is not None:
        with gguf.path.open("rb") as file:
            digest.update(file.read(gguf.header_bytes))
        for part in gguf.paths:
            digest.update(_sampled(part))
        return digest.hexdigest()
    path = find_file(config.target, "config.json", config.revision)
    folder = Path(config.target) if path is None else path.parent
    for name in _WHOLE:
        found = folder / name
        if found.is_file():
            digest.update(name.encode() + found.read_bytes())
    for found in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest.update(_sampled(found))
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for start in range(0, size, max(_PART, size // _MOST_PARTS)):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.digest()
