"""Multi-token prediction (DeepSeek-V3, section 2.2 of arXiv 2412.19437): the layer that a target was trained with.

Fed h, the target's feature of position t after its final norm, and token t + 1, the layer computes

    x = W [norm(embedding of the token), norm(h)]      h' = norm(decoder layer(x))      logits = output matrix(h')

and h', the feature of t + 1, is fed back for the next draft. Embedding and output matrix are the target's own, unless
the checkpoint has others. The decoder layer is of the target's own kind, so it is loaded and run as a transformers
model of the target's class with one layer, over an arena of its own.

DeepSeek's, GLM's and Qwen's layers read and feed back features after the norm, as transformers and SGLang serve them;
vLLM feeds back those of DeepSeek's and GLM's layers without it. Of several layers the first drafts all tokens; no
other is loaded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.attention import Attend
from engine.attention.registry import ATTENTION_NAME, CurrentPass, Ragged
from engine.errors import ModelError
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.checkpoint import check_complete, read_config, told_as_model_error
from engine.model.fallback import prepare
from engine.model.gguf.files import gguf_file
from engine.model.published.base import Codes, Weights
from engine.model.published.methods import quantisation_of, without_quantisation
from engine.model.runner import layout_of_model
from engine.model.tap import FINAL
from engine.proposers.heads.base import Head, HeadContext
from engine.proposers.heads.mtp_tensors import BESIDE, EMBEDDING, OUTPUT, TABLES, MTPFinder, names_here, read_wanted
from engine.proposers.heads.proposer import HeadProposer
from engine.proposers.heads.weights import fill

log = logging.getLogger(__name__)

_PLACES = (FINAL,)
_NUMBER = "num_nextn_predict_layers"  # of DeepSeek's and GLM's configs


class MTPParts(nn.Module):
    """The parts of an MTP layer in front of its decoder layer; `norm` is a norm of the target's kind, and is copied."""

    def __init__(self, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Embeddings `[T, hidden]` of tokens and the features before them -> the decoder layer's input."""
        return cast("Tensor", self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(features)], -1)))


def load_mtp(name: str, revision: str | None, target: PreTrainedModel) -> Head:
    """The first MTP layer of the checkpoint that `target` was loaded from, in its type and on its device.

    Raises:
        ModelError: the checkpoint has none, or one of a family that is not known, or it is not whole.
    """
    if gguf_file(name, revision) is not None:
        raise ModelError(f"mtp: {name!r} is a GGUF file, whose MTP layers are not read")
    finder = MTPFinder.of(target.config)
    if finder is None:
        raise ModelError(f"mtp: {name!r} is a {target.config.model_type} model, whose MTP layers are not known")
    with told_as_model_error(f"{name} (MTP layer)"):
        config = read_config(name, revision)
        weights = _weights(name, revision, config, finder)
        has_tables = OUTPUT in weights
        model = _model_of(name, without_quantisation(config), weights, target)
        model.mtp = parts = _parts_of(name, weights, model, target)  # in the model: what is packed there is packed here
    tables = model if has_tables else target

    def proposer(context: HeadContext) -> HeadProposer:
        assert context.arena is not None, "it has a layout"
        return HeadProposer(MTPRunner(model, parts, tables, context.arena, context.attend), context.tap, _PLACES,
                            context.prefill)  # fmt: skip

    return Head(_PLACES, layout_of_model(model), proposer)


def tell_of_mtp(name: str, revision: str | None, target: PreTrainedModel) -> None:
    """Log that the checkpoint of `target` has MTP layers, if it has: they draft only with the option `mtp`."""
    finder = MTPFinder.of(target.config)
    if finder is not None and finder.has_layers(names_here(name, revision)):
        log.info("%r has layers for multi-token prediction; with the option mtp they draft", name)


def _weights(name: str, revision: str | None, config: PreTrainedConfig, finder: MTPFinder) -> Weights:
    """The first layer's by our names; with an embedding and an output matrix where they are not both the target's."""
    stored = read_wanted(name, revision, finder)
    quantisation = quantisation_of(name, config)
    weights: Weights = {**stored} if quantisation is None else quantisation.read(stored)
    found, layers = finder.first_layer(weights)
    if not found:
        raise ModelError(
            f"mtp: {name!r} has no MTP layers among its tensors ({_NUMBER} of its config is "
            f"{getattr(config, _NUMBER, None)}); published copies often leave them out"
        )
    if layers > 1:
        log.info("%r has %d MTP layers; the first one drafts", name, layers)
    shared = finder.of_target(weights)
    if config.tie_word_embeddings and EMBEDDING in shared:
        shared.setdefault(OUTPUT, shared[EMBEDDING])
    own = {key: found.pop(key) for key in TABLES if key in found}
    is_shared = all(key in shared and _same(table, shared[key]) for key, table in own.items())
    return found if is_shared else found | shared | own


def _same(one: Tensor | Codes, other: Tensor | Codes) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


class _Dequantising:
    """A weight of codes, dequantised when transformers takes it."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self._codes, self._dtype = codes, dtype

    def __getitem__(self, _: object) -> Tensor:
        return self._codes.dequantised().to(self._dtype)


def _model_of(name: str, config: PreTrainedConfig, weights: Weights, target: PreTrainedModel) -> PreTrainedModel:
    """The decoder layer and its norm as a model of the target's class, with the tables of `weights` or tiny ones."""
    given: dict[str, Any] = dict.fromkeys(TABLES, torch.zeros(1, config.hidden_size, dtype=target.dtype))
    if OUTPUT not in weights:
        config.vocab_size = 1
    for key, weight in weights.items():
        if key not in BESIDE:
            given[key] = weight if isinstance(weight, Tensor) else _Dequantising(weight, target.dtype)
    for key, value in _of_one_layer(config).items():
        setattr(config, key, value)
    prepare(config)
    transformers_logging.disable_progress_bar()  # it would write into the log of a server
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded: Any = kind.from_pretrained(
        None,
        config=config,
        state_dict=given,
        dtype=target.dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `check_complete` reports them in a clearer message
    )
    model, report = loaded
    check_complete(f"{name} (MTP layer)", report)
    if report["unexpected_keys"]:
        raise ModelError(f"mtp: {name!r} has {min(report['unexpected_keys'])} in its MTP layer, which is not known")
    return cast("PreTrainedModel", model.to(target.device).eval())


def _of_one_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """What is different in the config of a model of the MTP layer: it attends, and has experts if any layer has."""
    by_layer = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    known = {key: value for key, value in by_layer.items() if getattr(config, key, None) is not None}
    return known | {"num_hidden_layers": 1, "tie_word_embeddings": False}


def _parts_of(name: str, weights: Weights, model: PreTrainedModel, target: PreTrainedModel) -> MTPParts:
    parts = MTPParts(model.config.hidden_size, cast("nn.Module", model.get_decoder().norm))
    found = {key: weights[key] for key in BESIDE if key in weights}
    fill(parts, {key: x if isinstance(x, Tensor) else x.dequantised() for key, x in found.items()}, name)
    return parts.to(target.device, target.dtype).eval()


class MTPRunner:
    """An MTP layer over an arena of its own, with the embedding and the output matrix of `tables`."""

    def __init__(
        self, model: PreTrainedModel, parts: MTPParts, tables: PreTrainedModel, arena: KVArena, attend: Attend
    ) -> None:
        self.arena, self._model, self._parts, self._attend = arena, model, parts, attend
        self._embedding, self._output = tables.get_input_embeddings(), tables.get_output_embeddings()
        self._current = CurrentPass.of(model)

    def project(self, features: Tensor) -> Tensor:
        """The layer takes the target's features as they are."""
        return features

    def forward(self, feeds: Seq[Feed], features: Tensor) -> Tensor:
        """One pass, `features` `[T, hidden]` beside the tokens of `feeds`; new ones `[R, hidden]` at the last rows."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, features.device)
        ragged = Ragged(batch, self.arena, self._attend)
        embedded = self._parts(self._embedding(batch.input_ids), features)
        with self._current.runs(ragged):
            made: Any = self._model.get_decoder()(
                inputs_embeds=embedded[None], position_ids=batch.position_ids[None], use_cache=False, ragged=ragged
            )
        rows: Tensor = made.last_hidden_state[0]
        return rows[batch.logit_rows]

    def logits(self, features: Tensor) -> Tensor:
        """float32 `[R, vocab]` of features that `forward` made."""
        return cast("Tensor", self._output(features).float())
