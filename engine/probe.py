"""Does a model keep to the contract of a ragged batch? Asked once at load, so that no request ever finds out.

A model that attends in code of its own, or keeps state besides K/V (recurrent layers, convolutions), would load,
run and mix the contexts of strangers. Three passes over tiny sequences tell.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import Attend
from engine.batch import Feed
from engine.errors import ModelError
from engine.kv import KVArena, KVLayout
from engine.runner import ModelRunner

_LENGTH = 6


def probe(model: PreTrainedModel, layout: KVLayout, attend: Attend) -> None:
    """Refuse a model whose logits depend on batch mates, or on how a sequence was cut into passes.

    Raises:
        ModelError: what it did wrong.
    """
    arena = KVArena(layout, num_pages=2, page_size=_LENGTH, device=model.device)
    runner = ModelRunner(model, arena, attend)
    tokens = [(7 * i + 3) % runner.vocab_size for i in range(2 * _LENGTH)]
    mine, other = tokens[:_LENGTH], tokens[_LENGTH:]
    try:
        alone = runner.forward([Feed(mine, 0, [0], _LENGTH)])
        _check_arena(model, arena)
        together = runner.forward([Feed(other, 0, [1], 0), Feed(mine, 0, [0], _LENGTH)])
        runner.forward([Feed(mine[:2], 0, [0], 0)])
        in_parts = runner.forward([Feed(mine[2:], 2, [0], _LENGTH - 2)])
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"{_name(model)} cannot run a ragged batch: {error!r}") from error
    _check_equal(model, together, alone, "on the other sequences of a batch")
    _check_equal(model, in_parts, alone[2:], "on more than tokens, keys and values: it keeps a state of its own")


def _check_arena(model: PreTrainedModel, arena: KVArena) -> None:
    for layer, k in enumerate(arena.k):
        if not k.any():
            raise ModelError(f"{_name(model)}: layer {layer} does not go through the attention interface")


def _check_equal(model: PreTrainedModel, got: Tensor, want: Tensor, on_what: str) -> None:
    # bf16 keeps 8 bits, and another batch shape rounds differently in every layer; a wrong context is off by far more.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    spread = float(want.std())
    if not torch.allclose(got, want, rtol=0, atol=tolerance * max(spread, 1e-3)):
        raise ModelError(f"{_name(model)}: its logits depend {on_what}")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
