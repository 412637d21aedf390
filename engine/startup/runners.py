"""Chooses how a model runs: all sequences in one pass, or one sequence at a time.

A decoder runs ragged batches. A transformers module is tried with ragged batches first, then one sequence at a time
with transformers' own attention: with its K/V in our arena, or recomputing the whole sequence in every pass. A
self-test decides: a model with its own attention code, or with state besides K/V, would load and run but mix the
contexts of requests; one whose attention needs more arguments than our hook receives would give wrong results. A few
passes over tiny sequences detect both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pilotfish.engine.attention import Attend, fitting, native
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.attention.registry import ATTENTION_NAME
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena, KVLayout
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.model.checkpoint import shape_of
from pilotfish.engine.model.decoder.decoder import DecoderModel, is_batch_invariant
from pilotfish.engine.model.runner import ModelRunner, Runner, layout_of_model

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig, PreTrainedModel

    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.model.adapters.store import Adapters
    from pilotfish.engine.model.decoder.decoder import Model
    from pilotfish.engine.model.unbatched import UnbatchedRunner
    from pilotfish.engine.proposers.sources import DraftSource
    from pilotfish.engine.recurrent.arena import StateArena

log = logging.getLogger(__name__)

_LENGTH, _PAGE = 12, 5  # tokens of each sequence of the self-test, with a page size that does not divide any part
_MINE, _OTHER = (4, 0, 2), (1, 3, 5)  # their pages
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_NEVER = {"xlm": "treats tokens equal to its pad token as padding"}  # by model type
# Errors of a model's code that does not support our batches or caches.
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its mode of execution.

    Attributes:
        model: the model, or this process's shard of it.
        layout: of its arena.
        attend: its attention in ragged batches; None: one sequence at a time.
    """

    model: Model
    layout: KVLayout
    attend: Attend | None

    @classmethod
    def of(cls, config: EngineConfig, model: Model, *, fixed: bool = False) -> LoadedModel:
        """Choose how a model runs; `fixed`: batch-invariant attention.

        Raises:
            ModelError: it cannot run; the message has all reasons.
        """
        if isinstance(model, DecoderModel):
            layout, row_wise = layout_of_model(model).stored_as(config.kv_cache_dtype), is_batch_invariant(model)
            name = "fixed" if fixed and not row_wise else config.attention
            run = partial(_run_once, model, layout)
            return cls(model, layout, fitting(name, model.device, run, row_wise=row_wise))
        try:
            layout = layout_of_model(model).stored_as(config.kv_cache_dtype)
            attend = fitting(config.attention, model.device, partial(check_ragged_contract, model, layout))
        except (ModelError, *_FAULTS) as error:
            is_own = isinstance(error, ModelError)
            reason = str(error) if is_own else f"{_name(model)} cannot run a ragged batch: {error!r}"
            layout = _layout_alone(model, reason)
            log.warning("%s runs one sequence at a time (slower): %s", _name(model), reason)
            return cls(model, layout, None)
        return cls(model, layout, attend)

    def runner(
        self, arena: KVArena, adapters: Adapters | None = None, states: StateArena | None = None
    ) -> ModelRunner | UnbatchedRunner:
        if self.attend is not None:
            during: Any = nullcontext if adapters is None else adapters.during
            return ModelRunner(self.model, arena, self.attend, during, states)
        from pilotfish.engine.model.unbatched import UnbatchedRunner  # imports transformers

        return UnbatchedRunner(self.model, arena)  # type: ignore[arg-type]  # no decoder


def check_allowed(config: EngineConfig, target: Model, sources: Mapping[str, DraftSource]) -> None:
    """Raise ModelError, with the option, for features that transformers' modules do not support.

    Of `sources` they support only draft models.
    """
    if isinstance(target, DecoderModel):
        return
    asked = {
        "reproducible": config.reproducible,  # not batch-invariant
        "loop = rounds": config.loop == "rounds",
        **{f"draft {source.entry!r}": kind != "model" for kind, source in sources.items()},
        "adapter": bool(config.adapter),
        "kv_cache_dtype": config.kv_cache_dtype != "auto",  # transformers' attention reads floats
    }
    found = next((name for name, is_asked in asked.items() if is_asked), None)
    if found is not None:
        raise ModelError(
            f"{found} is not supported for {config.target!r}: {target.config.model_type} is not in the table of "
            "architectures and runs in transformers"
        )
    if target.device.type == "cpu" and target.dtype == torch.bfloat16:
        log.warning(
            "%s runs in bfloat16, and torch's rounding depends on the batch shape: drafts, chunked prefill and the "
            "prefix cache may change its tokens; use float32 to avoid that",
            _name(target),
        )


def _run_once(model: DecoderModel, layout: KVLayout, attend: Attend) -> None:
    """Run attention of one row in each kind of layer, to compile the kernels."""
    if getattr(attend, "func", attend) is native.attend:
        return
    arena = KVArena(layout, num_pages=1, page_size=_PAGE, device=model.device)
    batch = RaggedBatch.of([Feed.begun([0], 0, 1)], _PAGE, model.device)
    heads = shape_of(model.config, "num_attention_heads")
    for kind in dict.fromkeys(layer for layer in layout.layers if layer is not None):
        k, v = (rows[layout.layers.index(kind)] for rows in (arena.k, arena.v))
        query = torch.zeros(1, max(heads, kind.heads), kind.key_dim, dtype=model.dtype, device=model.device)
        attend(query, k, v, batch, AttentionSpec(1.0))


# --------------------------------------------------------------------------- the self-test of transformers' modules


def check_ragged_contract(model: PreTrainedModel, layout: KVLayout, attend: Attend) -> None:
    """Refuse a model whose logits in ragged batches differ from those of its own plain pass.

    Raises:
        ModelError: the model fails; the message has the reason.
    """
    from pilotfish.engine.model.unbatched import plain_logits

    if model.config._attn_implementation != ATTENTION_NAME:  # noqa: SLF001 - there is no public way to read it
        raise ModelError(f"{_name(model)} does not use the attention interface, which ragged batches require")
    text = model.config.get_text_config()
    # Some layer types differ from ours only beyond the length of the self-test.
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        known = ", ".join(sorted(_LAYER_TYPES))
        raise ModelError(f"{_name(model)} has layer_types {', '.join(sorted(kinds))}; supported: {known}")
    arena, asked = _arena(model, layout), dict[int, set[int | None]]()

    def watch(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
        asked.setdefault(k.data_ptr(), set()).add(spec.window)
        return attend(query, k, v, batch, spec)

    runner = ModelRunner(model, arena, watch)
    runner.forward([Feed(_tokens(model)[:1], 0, _MINE)])
    for layer, k in enumerate(arena.k):
        if k.data_ptr() not in asked:
            raise ModelError(f"{_name(model)}: layer {layer} does not use the attention interface")
    model.set_attn_implementation("eager")
    try:
        plain = plain_logits(model, _tokens(model)[:_LENGTH])
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    _check_logits(model, runner, plain)
    # Each layer must pass the configured window; otherwise only transformers' mask would contain it.
    for layer, k in enumerate(arena.k):
        windows, wanted = asked[k.data_ptr()], _window(text, layer)
        if windows != {wanted}:
            passed = ", ".join(map(str, windows))
            raise ModelError(f"{_name(model)}: layer {layer} should have a window of {wanted}; it passed {passed}")


def _window(text: PreTrainedConfig, layer: int) -> int | None:
    kinds = getattr(text, "layer_types", None)
    window: int | None = getattr(text, "sliding_window", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def _layout_alone(model: PreTrainedModel, reason: str) -> KVLayout:
    """The arena layout of a model that runs one sequence at a time; `reason`: why it cannot run in batches.

    Raises:
        ModelError: it cannot run in this way, either.
    """
    from pilotfish.engine.model.unbatched import TOKENS, UnbatchedRunner, cache_layout, plain_logits, use_own_attention

    never = _NEVER.get(model.config.model_type)
    # Problems by model that the self-test does not show, or only as an error of torch.
    if "lsh" in (getattr(model.config.get_text_config(), "attn_layers", None) or ()):
        never = "has layers of type lsh, which are not supported"
    if never is not None:
        raise ModelError(f"{_name(model)} {never}")
    use_own_attention(model)
    try:
        plain = plain_logits(model, _tokens(model)[:_LENGTH])
        try:
            layout = cache_layout(model)
            _check_logits(model, UnbatchedRunner(model, _arena(model, layout)), plain)
        except (ModelError, *_FAULTS) as error:
            layout = TOKENS
            _check_logits(model, UnbatchedRunner(model, _arena(model, layout)), plain)
            log.warning("%s recomputes the whole sequence for every token: %r", _name(model), error)
    except (ModelError, *_FAULTS) as error:
        detail = str(error) if isinstance(error, ModelError) else repr(error)
        raise ModelError(f"{reason}; one sequence at a time: {detail}") from error
    return layout


def _check_logits(model: PreTrainedModel, runner: Runner, plain: Tensor) -> None:
    """Refuse a model whose logits depend on other sequences, on dropped drafts or on chunk boundaries.

    `plain`: logits of its own plain pass over the first text, `[_LENGTH, vocab]`.
    """
    mine, other = _tokens(model)[:_LENGTH], _tokens(model)[_LENGTH:]
    whole = runner.forward([Feed(mine, 0, _MINE, _LENGTH), Feed(other, 0, _OTHER, 0)])
    _check_equal(model, whole, plain, "its logits differ from those of a plain pass over one sequence")
    parts = [
        runner.forward([Feed(mine[:4], 0, _MINE, 4)]),
        runner.forward([Feed(other[:1], _LENGTH, _OTHER, 0), Feed([*mine[4:6], *other[:3]], 4, _MINE, 5)])[:2],
        runner.forward([Feed(mine[6:-1], 6, _MINE, _LENGTH - 7)]),  # over the three drafts, which are rolled back
        runner.forward([Feed(mine[-1:], _LENGTH - 1, _MINE, 1)]),
    ]
    problem = "its logits depend on how a sequence is split into passes, or on later tokens"
    _check_equal(model, torch.cat(parts), plain, problem)


def _check_equal(model: PreTrainedModel, got: Tensor, want: Tensor, problem: str) -> None:
    """Raise a ModelError with `problem` if logits differ by more than rounding."""
    spread, off = max(float(want.std()), 1e-3), (got - want).abs()
    # bfloat16 has 8 bits, and another batch shape rounds differently in every layer; a wrong context causes a much
    # larger error. The error of a whole row is compared, because a large vocabulary always has an outlier.
    is_exact = model.dtype == torch.float32
    furthest = off.max() if is_exact else off.square().mean(-1).sqrt().max()
    if not furthest <= (1e-3 if is_exact else 0.1) * spread:
        raise ModelError(f"{_name(model)}: {problem}")


def _arena(model: PreTrainedModel, layout: KVLayout) -> KVArena:
    return KVArena(layout, num_pages=len(_MINE) + len(_OTHER), page_size=_PAGE, device=model.device)


def _tokens(model: PreTrainedModel) -> list[int]:
    vocab = shape_of(model.config, "vocab_size")
    return [(7 * i + 3) % vocab for i in range(2 * _LENGTH)]


def _name(model: Model) -> str:
    return type(model).__name__
