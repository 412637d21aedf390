"""Draft models, proposers without heads, and the vocabulary map of a draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.checkpoint import shape_of
from pilotfish.engine.model.runner import ModelRunner, Runner, end_tokens, vocab_size
from pilotfish.engine.proposers import ModelProposer, NGramProposer, Proposer, SuffixProposer
from pilotfish.engine.proposers.model import first_layers
from pilotfish.engine.proposers.vocab import DraftVocabulary, MappedRunner, VocabMap
from pilotfish.engine.startup.runners import LoadedModel
from pilotfish.engine.text.codec import TOKENIZER_FILE, Codec

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.model.decoder.decoder import DecoderModel, Model
    from pilotfish.engine.model.unbatched import UnbatchedRunner
    from pilotfish.engine.proposers.sources import DraftSource


def draft_models(
    config: EngineConfig, sources: Mapping[str, DraftSource], target: Model, draft: Model | None, vocab: VocabMap | None
) -> dict[str, LoadedModel]:
    """The models that draft, by proposer name: a draft model, and the target's own first layers.

    Raises:
        ModelError: the draft is incompatible with this target.
    """
    models = dict[str, LoadedModel]()
    if draft is not None:
        if vocab is None and vocab_size(draft) != vocab_size(target):
            raise ModelError(
                f"the draft model has {vocab_size(draft)} tokens and target {config.target!r} "
                f"{vocab_size(target)}: a draft with another vocabulary requires a token map"
            )
        models["model"] = LoadedModel.of(config, draft)
    if "self" in sources:
        layers = sources["self"].layers
        layers = max(1, shape_of(target.config, "num_hidden_layers") // 3) if layers is None else layers
        first = first_layers(cast("DecoderModel", target), layers)  # ensured by `check_allowed`
        models["self"] = LoadedModel.of(config, first)
    return models


def model_proposers(
    runners: Mapping[str, ModelRunner | UnbatchedRunner], prefill: PrefillBudget, vocab: VocabMap | None
) -> dict[str, Proposer]:
    """The proposers without heads, by name: lookups, and the models with these `runners`; `vocab`: the draft's."""
    by_name: dict[str, Proposer] = {"none": Proposer(), "ngram": NGramProposer(), "suffix": SuffixProposer()}
    for name, own in runners.items():
        runner: Runner = MappedRunner(own, vocab, own.device) if name == "model" and vocab is not None else own
        by_name[name] = ModelProposer(runner, prefill, name)
    return by_name


def match_vocabularies(config: EngineConfig, source: DraftSource, target: Model, draft: Model) -> VocabMap | None:
    """Map the draft's token ids to the target's; None if both vocabularies are equal. `source`: of the draft.

    Raises:
        ModelError: the vocabularies differ, and a tokenizer is missing or too few tokens are shared.
    """
    names = (config.target, config.revision), (source.name, source.revision)
    files = [find_file(name, TOKENIZER_FILE, revision) for name, revision in names]
    models, widths = (target, draft), (vocab_size(target), vocab_size(draft))
    if files[0] and files[1] and files[0].read_bytes() == files[1].read_bytes() and widths[0] == widths[1]:
        return None  # true for most pairs; saves a second of reading vocabularies
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
