"""Self-test at load: does a model keep the contract of a ragged batch? A model that fails it never serves a request.

A model that has its own attention code, or keeps state besides K/V (recurrent layers, convolutions), would load and
run, but it would mix the contexts of different requests. A model whose attention needs more than our hook receives (a
mask that looks ahead, slopes, a window that is only in the mask) would run and give wrong results. A few passes over
tiny sequences detect both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention import Attend
from engine.attention.registry import ATTENTION_NAME
from engine.attention.spec import AttentionSpec
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed, RaggedBatch
from engine.model.one_by_one import plain_logits
from engine.model.runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LENGTH = 6
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_ragged_contract(model: PreTrainedModel, layout: KVLayout, attend: Attend) -> None:
    """Refuse a model whose logits depend on batch mates or on chunk borders, or differ from its own plain forward pass.

    Raises:
        ModelError: the model fails; the message says how.
    """
    _check_layers(model)
    arena = KVArena(layout, num_pages=2, page_size=_LENGTH, device=model.device)
    watch = _Windows(arena, attend)
    runner = ModelRunner(model, arena, watch)
    tokens = [(7 * i + 3) % runner.vocab_size for i in range(2 * _LENGTH)]
    mine, other = tokens[:_LENGTH], tokens[_LENGTH:]
    try:
        alone = runner.forward([Feed.begun(mine, 0, _LENGTH)])
        _check_arena(model, arena)
        together = runner.forward([Feed.begun(other, 1, 0), Feed.begun(mine, 0, _LENGTH)])
        runner.forward([Feed.begun([*mine[:2], *other[:2]], 0, 0)])
        in_parts = runner.forward([Feed(mine[2:], 2, [0], _LENGTH - 2)])
        plain = _plain_logits(model, mine)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"{_name(model)} cannot run a ragged batch: {error!r}") from error
    check_equal(model, together, alone, "its logits depend on the other sequences of a batch")
    check_equal(
        model, in_parts, alone[2:],
        "its logits depend on more than tokens, keys and values: it keeps a state of its own",
    )  # fmt: skip
    check_equal(model, alone, plain, "its attention does something that a ragged batch does not know of")
    _check_windows(model, watch)


class _Windows:
    """Wraps an attention and records the windows that layers pass to it, by the keys that they read."""

    def __init__(self, arena: KVArena, attend: Attend) -> None:
        self._attend = attend
        self._asked: dict[int, set[int | None]] = {}
        self._keys = arena.k

    @property
    def layers(self) -> list[int]:
        """Those that keep keys and values."""
        return [layer for layer, k in enumerate(self._keys) if k.numel()]

    def of_layer(self, layer: int) -> set[int | None]:
        """What the layer asked for, and any other that reads the same keys."""
        return self._asked[self._keys[layer].data_ptr()]

    def __call__(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        self._asked.setdefault(k.data_ptr(), set()).add(spec.window)
        return self._attend(query, k, v, batch, spec)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits of one sequence alone with transformers' own attention: `[len(tokens), vocab]`."""
    model.set_attn_implementation("eager")
    try:
        return plain_logits(model, tokens)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse unknown types of layers: some differ from ours only beyond the length of the self-test."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise ModelError(
            f"{_name(model)} has layers of type {', '.join(sorted(kinds))}; known are {', '.join(sorted(_LAYER_TYPES))}"
        )


def _check_windows(model: PreTrainedModel, watch: _Windows) -> None:
    """Check that each layer passes on the window of the config; otherwise only transformers' mask would contain it."""
    for layer in watch.layers:
        asked, wanted = watch.of_layer(layer), _window(model.config.get_text_config(), layer)
        if asked != {wanted}:
            told = ", ".join(map(str, asked))
            raise ModelError(f"{_name(model)}: layer {layer} should see {wanted} positions; it asked for {told}")


def _window(text: PreTrainedConfig, layer: int) -> int | None:
    kinds = getattr(text, "layer_types", None)
    window: int | None = getattr(text, "sliding_window", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def _check_arena(model: PreTrainedModel, arena: KVArena) -> None:
    for layer, k in enumerate(arena.k):
        if k.numel() and not k.any():
            raise ModelError(f"{_name(model)}: layer {layer} does not go through the attention interface")


def check_equal(model: PreTrainedModel, got: Tensor, want: Tensor, problem: str) -> None:
    """Raise a ModelError that states `problem` where logits differ by more than rounding."""
    spread, off = max(float(want.std()), 1e-3), (got - want).abs()
    # bfloat16 keeps 8 bits, and another batch shape rounds otherwise in every layer; a wrong context gives a far larger
    # error. We compare the error of a whole row: among the logits of a large vocabulary one is always an outlier.
    is_exact = model.dtype == torch.float32
    furthest = off.max() if is_exact else off.square().mean(-1).sqrt().max()
    if not furthest <= (1e-3 if is_exact else 0.1) * spread:
        raise ModelError(f"{_name(model)}: {problem}")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
