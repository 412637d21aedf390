"""A model's pass without transformers' code around it: embedding, layers, norm, output matrix, and nothing between.

That code prepares masks, caches and records that a ragged batch does not use, and it takes longer than the layers of a
small model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention import native
from engine.attention.registry import Ragged
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.runner import kv_layout
from engine.model.tap import FINAL, Tap
from engine.verdicts import verdict

log = logging.getLogger(__name__)

Rotary = tuple[Tensor, Tensor]  # cos and sin, [1, T, head_dim]
_PAGE, _START, _ROWS = 8, 4, 3  # of the equivalence test


class LayerStack(Protocol):
    """All layers of a model, which can run in one call (`stack.Stack`)."""

    taps: tuple[Tap, ...]

    def serves(self, hidden: Tensor, rotary: Seq[Rotary], ragged: Ragged) -> bool:
        """Whether the layers can run this pass in one call."""
        ...

    def at_once(self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        ...


def bypass_model_code(model: PreTrainedModel, layers: LayerStack) -> None:
    """Skip transformers' code around the layers of a model whose layers run in one call.

    This is done only if an equivalence test gives the same bits. A model that scales, caps or adds something outside
    its layers fails the test.
    """
    trunk = model.get_decoder()
    around = (getattr(trunk, "norm", None), getattr(trunk, "rotary_emb", None))
    if getattr(trunk, "layers", None) is not layers or not all(isinstance(part, nn.Module) for part in around):
        return
    straight = DirectPass(model)
    if verdict(lambda: _same_bits(straight, model)):
        cast("Any", model).forward = straight
        log.info("passes go straight through the layers")


class DirectPass:
    """Replaces a model's `forward`; the original still runs every pass that C cannot run over a ragged batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._trunk = model, cast("Any", model.get_decoder())
        self.__wrapped__ = model.forward  # `inspect` reads the parameters of `forward` through this name
        # Of each layer, where the model has several kinds of rotary positions.
        turns = cast("Any", self._trunk.rotary_emb)
        kinds = model.config.get_text_config().layer_types if hasattr(turns, "layer_types") else None
        self._kinds: Seq[str | None] = kinds or [None] * len(self._trunk.layers)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """`logits` `[1, R, vocab]` of the rows that `logits_to_keep` names, like the model's own `forward`."""
        logits = None if given else self.logits(**named)
        return self.__wrapped__(*given, **named) if logits is None else SimpleNamespace(logits=logits)

    def logits(
        self,
        ragged: Ragged | None = None,
        input_ids: Tensor | None = None,  # [1, T]
        position_ids: Tensor | None = None,  # [1, T]
        logits_to_keep: Tensor | int = 0,  # [R]
        **others: Any,
    ) -> Tensor | None:
        """Logits `[1, R, vocab]`; None where C cannot run the pass."""
        trunk, rows = self._trunk, logits_to_keep
        if ragged is None or input_ids is None or not isinstance(rows, Tensor) or others != {"use_cache": False}:
            return None
        hidden = self._model.get_input_embeddings()(input_ids)
        rotary = self._rotary(hidden, position_ids)
        if not trunk.layers.serves(hidden, rotary, ragged):
            return None
        made = trunk.layers.at_once(hidden, rotary, ragged)
        readers = [tap for tap in trunk.layers.taps if FINAL in tap.places]
        if readers:
            made = trunk.norm(made)
            for tap in readers:
                tap.keep(FINAL, made[0])
            kept = made[:, rows]
        else:
            kept = trunk.norm(made[:, rows])
        return cast("Tensor", cast("Any", self._model.get_output_embeddings())(kept))

    def _rotary(self, hidden: Tensor, position_ids: Tensor | None) -> list[Rotary]:
        turns, kinds = self._trunk.rotary_emb, set(self._kinds)
        made = {kind: turns(hidden, position_ids, *([] if kind is None else [kind])) for kind in kinds}
        return [made[kind] for kind in self._kinds]


@torch.inference_mode()
def _same_bits(straight: DirectPass, model: PreTrainedModel) -> bool:
    """Whether an equivalence test that starts in the middle of a text gives the same bits both ways."""
    vocab = model.config.get_text_config().vocab_size  # of the input; the logits may be wider
    tokens = torch.randint(vocab, (_ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = RaggedBatch.of([Feed(tokens, _START, [0], _ROWS)], _PAGE, model.device)
    arena = KVArena(kv_layout(model.config, model.dtype), 1, _PAGE, model.device)
    told: dict[str, Any] = {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "use_cache": False,
        "logits_to_keep": batch.logit_rows,
        "ragged": Ragged(batch, arena, native.attend),
    }
    mine = straight.logits(**told)
    return mine is not None and torch.equal(mine, model(**told).logits)
