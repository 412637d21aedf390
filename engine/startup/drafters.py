"""Loads and sizes everything that can draft under a config, and gives each its arena. Runs at start-up only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from engine.attention import Attend
from engine.control.prefill_budget import PrefillBudget
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.model.bounded import find_file
from engine.model.checkpoint import shape_of
from engine.model.runner import ModelRunner, Runner, end_tokens, layout_of_model, vocab_size
from engine.model.tap import Tap
from engine.proposers import ModelProposer, NGramProposer, Proposer, SuffixProposer
from engine.proposers.heads.base import Head, HeadContext
from engine.proposers.model import first_layers
from engine.proposers.vocab import DraftVocabulary, MappedRunner, VocabMap
from engine.startup.runners import Ways, alone
from engine.startup.states import StatePlan
from engine.text.codec import TOKENIZER_FILE, Codec
from engine.types import Adapter

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from engine.config import EngineConfig
    from engine.model.decoder.decoder import DecoderModel, Model
    from engine.model.one_by_one import OneByOneRunner

MakeArena = Callable[[KVLayout], KVArena]


@dataclass(frozen=True)
class Drafters:
    """The draft models and heads of a target. Proposers without weights are not among them."""

    target: Model
    models: Mapping[str, Model]  # by proposer name: a draft model, or the target's own first layers
    heads: Mapping[str, Head]  # by proposer name
    tap: Tap | None  # where the heads read the target's hidden states
    layouts: Mapping[str, KVLayout]  # by proposer name, for those that need an arena
    vocab: VocabMap | None = None  # for a draft model of another vocabulary

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        target: Model,
        draft: Model | None,
        vocab: VocabMap | None = None,
        ways: Ways | None = None,
        heads: Mapping[str, Head] = MappingProxyType({}),
        tap: Tap | None = None,
    ) -> Drafters:
        """Gather what drafts: the draft model, which runs as in `ways`, and heads, which read the target through `tap`.

        Raises:
            ModelError: the draft does not fit this target.
        """
        models, layouts, stored = dict[str, Any](), dict[str, KVLayout](), config.kv_cache_dtype
        if draft is not None:
            if vocab is None:
                _check_vocabulary(config, target, draft)
            alone = None if ways is None else ways.alone.get(draft)
            models["model"], layouts["model"] = draft, alone or layout_of_model(draft).stored_as(stored)
        if config.self_layers is not None or config.proposer == "self":
            layers = config.self_layers or max(1, shape_of(target.config, "num_hidden_layers") // 3)
            models["self"] = first_layers(cast("DecoderModel", target), layers)  # `check_allowed` said so
            whole = layout_of_model(models["self"]).stored_as(stored)
            layouts["self"] = replace(whole, layers=whole.layers[:layers])
        layouts |= {name: head.layout.stored_as(stored) for name, head in heads.items() if head.layout is not None}
        return cls(target, models, heads, tap, layouts, vocab)

    def runners(
        self,
        make_arena: MakeArena,
        attention_of: Callable[[Model, KVLayout], Attend],
        states: StatePlan,
        ways: Ways,
    ) -> dict[str, ModelRunner | OneByOneRunner]:
        """Make a runner for each draft model, each with its own arena.

        Raises:
            ModelError: a model does not keep the contract of a ragged batch.
        """
        made: dict[str, ModelRunner | OneByOneRunner] = {}
        for name, model in self.models.items():
            arena = make_arena(self.layouts[name])
            if model in ways.alone:
                made[name] = alone(model, arena)
                continue
            attend = ways.attends.get(model) or attention_of(model, self.layouts[name])
            made[name] = ModelRunner(model, arena, attend, states=states.arena(name, model.device))
        return made

    def proposers(
        self,
        target: Runner,
        runners: Mapping[str, ModelRunner | OneByOneRunner],
        make_arena: MakeArena,
        attend: Attend,
        prefill: PrefillBudget,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),  # of the target, by the head that drafts with it
    ) -> dict[str, Proposer]:
        """Make one proposer per name that a request may ask for. The target's self-test comes before this call.

        Raises:
            ModelError: the hidden states of the target cannot be read.
        """
        by_name: dict[str, Proposer] = {"none": Proposer(), "ngram": NGramProposer(), "suffix": SuffixProposer()}
        for name, own in runners.items():
            vocab = self.vocab if name == "model" else None
            runner: Runner = own if vocab is None else MappedRunner(own, vocab, own.device)
            by_name[name] = ModelProposer(runner, prefill)
        if self.tap is not None and self.heads:
            by_name |= self._head_proposers(target, self.tap, make_arena, attend, prefill, adapters)
        return by_name

    @property
    def any_of(self) -> tuple[str, ...]:
        """The proposers that `auto` stands for: all that have weights, and the better of the lookups."""
        names = (*self.models, *self.heads)
        return (*names, "suffix") if names else ()

    def _head_proposers(
        self,
        target: Runner,
        tap: Tap,
        make_arena: MakeArena,
        attend: Attend,
        prefill: PrefillBudget,
        adapters: Mapping[str, Adapter],
    ) -> dict[str, Proposer]:
        """Make the proposers that read the target's hidden states, all through one tap."""
        made = dict[str, Proposer]()
        for name, head in self.heads.items():
            arena = make_arena(self.layouts[name]) if name in self.layouts else None
            made[name] = head.proposer(HeadContext(target, tap, arena, attend, prefill, adapters.get(name)))
        return made


def _check_vocabulary(config: EngineConfig, target: Model, draft: Model) -> None:
    if vocab_size(draft) != vocab_size(target):
        raise ModelError(
            f"draft {config.draft!r} has {vocab_size(draft)} tokens and target {config.target!r} {vocab_size(target)}: "
            "a draft of another vocabulary needs a map"
        )


def match_vocabularies(config: EngineConfig, target: Model, draft: Model) -> VocabMap | None:
    """Map the draft's token ids to the target's; None where both vocabularies are the same.

    Raises:
        ModelError: the vocabularies differ, and a tokenizer is missing or too few tokens are shared.
    """
    assert config.draft is not None
    names = (config.target, config.revision), (config.draft, config.draft_revision)
    files = [find_file(name, TOKENIZER_FILE, revision) for name, revision in names]
    models, widths = (target, draft), (vocab_size(target), vocab_size(draft))
    if files[0] and files[1] and files[0].read_bytes() == files[1].read_bytes() and widths[0] == widths[1]:
        return None  # true for most pairs, and saves the second that reading the meaning of each token takes
    return VocabMap.between(
        *(
            read_vocabulary(*name, width, model.config, end_tokens(model))
            for name, width, model in zip(names, widths, models, strict=True)
        )
    )


def read_vocabulary(
    name: str, revision: str | None, width: int, config: PreTrainedConfig, ends: Iterable[int]
) -> DraftVocabulary:
    """Read the tokens of a checkpoint."""
    codec = Codec.load(name, revision)
    begin = getattr(config.get_text_config(), "bos_token_id", None)
    return DraftVocabulary.of(name, width, None if codec is None else codec.tokenizer, begin, ends)
