"""Self-test at load: does a model keep the contract of a ragged batch? A model that fails it never serves a request.

A model that has its own attention code, or keeps state besides K/V (recurrent layers, convolutions), would load and
run, but it would mix the contexts of different requests. A model whose attention needs more than our hook receives (a
mask that looks ahead, slopes, sinks, a window that is only in the mask) would run and give wrong results. A few passes
over tiny sequences detect both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import Attend
from engine.attention.registry import ATTENTION_NAME
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed, RaggedBatch
from engine.model.linear.int8 import has_int8
from engine.model.runner import ModelRunner
from engine.verdicts import verdict

_LENGTH = 6
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_ragged_contract(model: PreTrainedModel, layout: KVLayout, attend: Attend) -> None:
    """Refuse a model whose logits depend on batch mates or on chunk borders, or differ from its own plain forward pass.

    Raises:
        ModelError: the model fails; the message says how.
    """
    verdict(lambda: _passes(model, layout, attend))


def _passes(model: PreTrainedModel, layout: KVLayout, attend: Attend) -> bool:
    _check_layers(model)
    arena = KVArena(layout, num_pages=2, page_size=_LENGTH, device=model.device)
    watch = _Windows(arena, attend)
    runner = ModelRunner(model, arena, watch)
    tokens = [(7 * i + 3) % runner.vocab_size for i in range(2 * _LENGTH)]
    mine, other = tokens[:_LENGTH], tokens[_LENGTH:]
    try:
        alone = runner.forward([Feed(mine, 0, [0], _LENGTH)])
        _check_arena(model, arena)
        together = runner.forward([Feed(other, 0, [1], 0), Feed(mine, 0, [0], _LENGTH)])
        runner.forward([Feed(mine[:2], 0, [0], 0)])
        in_parts = runner.forward([Feed(mine[2:], 2, [0], _LENGTH - 2)])
        plain = _plain_logits(model, mine)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"{_name(model)} cannot run a ragged batch: {error!r}") from error
    _check_equal(model, together, alone, "its logits depend on the other sequences of a batch")
    _check_equal(
        model,
        in_parts,
        alone[2:],
        "its logits depend on more than tokens, keys and values: it keeps a state of its own",
    )
    _check_equal(model, alone, plain, "its attention does something that a ragged batch does not know of")
    _check_windows(model, watch)
    return True


class _Windows:
    """Wraps an attention and records the window that each layer passes to it."""

    def __init__(self, arena: KVArena, attend: Attend) -> None:
        self._layer_of = {k.data_ptr(): layer for layer, k in enumerate(arena.k)}
        self._attend = attend
        self.of_layer: dict[int, int | None] = {}

    def __call__(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self.of_layer[self._layer_of[k.data_ptr()]] = window
        return self._attend(query, k, v, batch, scale, window, softcap)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits of one sequence alone with transformers' own attention: `[len(tokens), vocab]`."""
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits.float()


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse unknown layer types by name: some differ from ours only beyond the length that the self-test runs."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise ModelError(
            f"{_name(model)} has layers of type {', '.join(sorted(kinds))}; there is only full and sliding"
        )


def _check_windows(model: PreTrainedModel, watch: _Windows) -> None:
    """Check that each layer passes on the window of the config; otherwise only transformers' mask would contain it."""
    for layer, window in sorted(watch.of_layer.items()):
        wanted = _window(model.config.get_text_config(), layer)
        if window != wanted:
            raise ModelError(f"{_name(model)}: layer {layer} should see {wanted} positions; it asked for {window}")


def _window(text: PreTrainedConfig, layer: int) -> int | None:
    kinds = getattr(text, "layer_types", None)
    window: int | None = getattr(text, "sliding_window", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def _check_arena(model: PreTrainedModel, arena: KVArena) -> None:
    for layer, k in enumerate(arena.k):
        if not k.any():
            raise ModelError(f"{_name(model)}: layer {layer} does not go through the attention interface")


def _check_equal(model: PreTrainedModel, got: Tensor, want: Tensor, problem: str) -> None:
    spread, off = max(float(want.std()), 1e-3), (got - want).abs()
    # bf16 keeps 8 bits, and another batch shape rounds differently in every layer; a wrong context gives a far larger
    # error. In int8 a difference in the last bit sometimes becomes a step of 1/127. We compare the error of a whole
    # row, because among the hundred thousand logits of a large vocabulary one is always an outlier.
    is_exact = model.dtype == torch.float32 and not has_int8(model)
    furthest = off.max() if is_exact else off.square().mean(-1).sqrt().max()
    tolerance = 1e-3 if is_exact else 0.1
    if not furthest <= tolerance * spread:
        raise ModelError(f"{_name(model)}: {problem}")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
