"""How the models of an engine run: all sequences in one pass, or one sequence at a time where a model's code cannot.

Every model is tried in ragged batches first. One that fails the self-test there is tried alone, with transformers' own
attention: first with its keys and values in our arena, then fed its whole text in every pass. A self-test decides each
time, by the same comparisons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.attention import Attend
from engine.attention.registry import ATTENTION_NAME
from engine.choices import HEADS
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed
from engine.model.checkpoint import shape_of
from engine.model.decoder.decoder import DecoderModel

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedModel

    from engine.config import EngineConfig
    from engine.model.decoder.decoder import Model
    from engine.model.one_by_one import OneByOneRunner

log = logging.getLogger(__name__)

_LENGTH, _PAGE = 12, 5  # tokens of each sequence of the self-test, in pages of a size that divides no part of it
_MINE, _OTHER = (4, 0, 2), (1, 3, 5)  # their pages
_NEVER = {"xlm": "takes the tokens of its text that equal its pad token for padding"}  # by model type


# What the code of a model raises that is not made for a cache like ours.
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Ways:
    """How each model runs: its attention in ragged batches, or what its arena holds where it runs alone."""

    attends: Mapping[Model, Attend] = field(default_factory=dict)
    alone: Mapping[Model, KVLayout] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        target: Model,
        draft: Model | None,
        ragged: Callable[[Model], Attend],
    ) -> Ways:
        """Find the way of each model; `ragged` chooses the attention that passes the self-test of ragged batches.

        Raises:
            ModelError: a model runs in no way; the message gives the reason for each.
        """
        attends, alone = dict[Any, Attend](), dict[Any, KVLayout]()
        for model in (target,) if draft is None else (target, draft):
            if isinstance(model, DecoderModel):
                attends[model] = ragged(model)
                continue
            try:
                attends[model] = _tried(model, ragged)
            except ModelError as error:
                alone[model] = _layout_alone(model, error)
        return cls(attends, alone)


def _tried(model: PreTrainedModel, ragged: Callable[[Model], Attend]) -> Attend:
    if model.config._attn_implementation != ATTENTION_NAME:  # noqa: SLF001 - there is no public way to read it
        raise ModelError(f"{_name(model)} attends in code of its own, which knows nothing of ragged batches")
    try:
        return ragged(model)
    except (AttributeError, KeyError, TypeError) as error:  # its config lacks what those of other families have
        raise ModelError(f"{_name(model)} cannot run a ragged batch: {error!r}") from error


def check_allowed(config: EngineConfig, target: Model) -> None:
    """Refuse what a target cannot have that transformers' module runs.

    Raises:
        ModelError: names the first of it that `config` asks for.
    """
    if isinstance(target, DecoderModel):
        return
    asked = {
        "reproducible": config.reproducible,  # the order of its sums hangs on how many tokens a pass feeds
        "loop = rounds": config.loop == "rounds",
        **{name: getattr(config, name) is not None for name in HEADS},
        "mtp": config.mtp,
        "self_layers": config.self_layers is not None or config.proposer == "self",
        "adapter": bool(config.adapter),
        "kv_cache_dtype": config.kv_cache_dtype != "auto",  # transformers' attention reads floats
    }
    found = next((name for name, is_asked in asked.items() if is_asked), None)
    if found is not None:
        raise ModelError(
            f"{found} is not supported for {config.target!r}: {target.config.model_type} is not in the table of "
            "architectures, and transformers' module runs it"
        )
    if target.device.type == "cpu" and target.dtype == torch.bfloat16:
        log.warning(
            "%s is in bfloat16, which torch rounds by the number of tokens of a pass: drafts, chunks and the prefix "
            "cache may change its tokens; in float32 they do not",
            _name(target),
        )


def _layout_alone(model: PreTrainedModel, error: ModelError) -> KVLayout:
    """What the arena of a model holds that runs one sequence at a time; `error` says why it runs in no other way."""
    from engine.model.one_by_one import plain_logits, tokens_layout, use_own_attention

    _check_kinds(model)
    use_own_attention(model)
    try:
        plain = plain_logits(model, _tokens(model)[:_LENGTH])
        layout, why = _with_cache(model, plain)
        if layout is None:
            layout = tokens_layout()
            _check_alone(model, layout, plain)
            log.warning("%s is fed its whole text for every token: %s", _name(model), why)
    except (ModelError, *_FAULTS) as other:
        told = str(other) if isinstance(other, ModelError) else repr(other)
        raise ModelError(f"{error}; one sequence at a time: {told}") from error
    log.warning("%s runs one sequence at a time, which is slower: %s", _name(model), error)
    return layout


def _check_kinds(model: PreTrainedModel) -> None:
    """Refuse by name what shows only in texts unlike those of the self-test, or there by an error of torch alone."""
    if "lsh" in (getattr(model.config.get_text_config(), "attn_layers", None) or ()):
        raise ModelError(f"{_name(model)} has layers of type lsh, which find what to attend to by hashes of the text")
    reason = _NEVER.get(model.config.model_type)
    if reason is not None:
        raise ModelError(f"{_name(model)} {reason}")


def _with_cache(model: PreTrainedModel, plain: Tensor) -> tuple[KVLayout | None, str]:
    """The layout of the model's keys and values if it runs with them; else None, and why not."""
    from engine.model.one_by_one import cache_layout

    try:
        layout = cache_layout(model)
        if layout is None:
            return None, "transformers has no cache of keys and values for it"
        _check_alone(model, layout, plain)
    except (ModelError, *_FAULTS) as error:
        return None, f"with a cache of keys and values {error!r}"
    return layout, ""


def _check_alone(model: PreTrainedModel, layout: KVLayout, plain: Tensor) -> None:
    """Refuse a model whose logits depend on other sequences, on drafts taken back or on borders of chunks.

    `plain` are the logits of its own plain pass over the first text: `[_LENGTH, vocab]`.
    """
    from engine.startup.self_test import check_equal

    arena = KVArena(layout, num_pages=len(_MINE) + len(_OTHER), page_size=_PAGE, device=model.device)
    runner = alone(model, arena)
    mine, other = _tokens(model)[:_LENGTH], _tokens(model)[_LENGTH:]
    whole = runner.forward([Feed(mine, 0, _MINE, _LENGTH), Feed(other, 0, _OTHER, 0)])
    drafted = [Feed(mine[:4], 0, _MINE, 4), Feed([*mine[4:6], *other[:3]], 4, _MINE, 5)]
    rest = [Feed(other[:1], _LENGTH, _OTHER, 0), Feed(mine[6:-1], 6, _MINE, _LENGTH - 7)]
    parts = runner.forward([*drafted, *rest, Feed(mine[-1:], _LENGTH - 1, _MINE, 1)])
    kept = torch.cat([parts[:6], parts[9:]])  # without the rows of the three drafts, which are taken back
    check_equal(model, whole, plain, "its logits are others than those of a pass without a cache")
    check_equal(model, kept, plain, "its logits depend on how its text is cut into passes, or on later tokens")


def alone(model: Any, arena: KVArena) -> OneByOneRunner:
    """The runner of a model whose sequences run one at a time."""
    from engine.model.one_by_one import OneByOneRunner  # imports transformers

    return OneByOneRunner(model, arena)


def _tokens(model: PreTrainedModel) -> list[int]:
    vocab = shape_of(model.config, "vocab_size")
    return [(7 * i + 3) % vocab for i in range(2 * _LENGTH)]


def _name(model: Model) -> str:
    return type(model).__name__
