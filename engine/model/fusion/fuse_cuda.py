"""Replacement modules for CUDA: our kernels run what `fuse` has joined. Uses shapes of modules and no family by name.

As in `fuse`, an equivalence test compares each replacement with the original on random rows, and the replacement stays
only if both give the same result.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.attention import reference
from engine.attention.registry import Ragged
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.decoder.attention import Joined, JoinedPart
from engine.model.decoder.norms import RMSNorm
from engine.model.decoder.ops import LayerOps
from engine.model.fusion.fuse import RotaryAttention, fuse
from engine.model.fusion.kernel_layers import NAMES, KernelAttention, KernelGate, KernelLayer, KernelNorm
from engine.model.linear.equivalence import EquivalenceTests, random_rows
from engine.model.linear.experts import StackedExperts
from engine.model.linear.fp8 import Fp8Linear
from engine.model.linear.unstack import recognised, together
from engine.model.runner import kv_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_ROWS, _PAGE = 3, 8  # of an equivalence test


def fuse_for_cuda(model: PreTrainedModel, ops: object = None) -> Counter[str]:
    """Join what `fuse` joins, then put our kernels into `model` wherever they fit; returns how many of each kind."""
    found, trials, done = _ops(ops), EquivalenceTests(), Counter[str]()
    run = partial(_try, model)
    done["mixtures"] = _take_experts_together(model, found, trials)
    fuse(model)
    for name in [name for name, _ in model.named_modules()][:0:-1]:  # inner modules come before outer ones
        if name.endswith(".inner"):
            continue  # the original of one of `fuse`'s replacements, which still needs it unchanged
        for kind, candidates in _KINDS.items():
            module = model.get_submodule(name)
            new = next((new for new in candidates(module, found) if trials.agree(kind, run, module, new)), None)
            if new is not None:
                model.set_submodule(name, new)
                done[kind] += 1
    done["sums handed on"] = link(model, trials)
    log.info("our kernels run %s", ", ".join(f"{count} {kind}" for kind, count in done.items()))
    return done


def _ops(ops: object) -> LayerOps:
    """The operations of the module `ops`; by default those of our kernels."""
    if ops is None:
        from engine.kernels import experts, rows  # import Triton

        return LayerOps.of(rows, experts)
    return ops if isinstance(ops, LayerOps) else LayerOps.of(ops)


def _take_experts_together(model: PreTrainedModel, ops: LayerOps, trials: EquivalenceTests) -> int:
    """Replace stacked experts whose gate our kernel knows by one call over their stacks; returns how many."""
    done = 0
    for name, form in list(recognised(model)):
        module = model.get_submodule(name)
        new = together(module, form, ops.mix)
        if new is not None and all(trials.agree("mixtures", run, module, new) for run in _mixtures(model, new)):
            model.set_submodule(name, new)
            done += 1
    return done


def _mixtures(model: PreTrainedModel, new: StackedExperts) -> Iterator[Callable[[nn.Module], Tensor]]:
    """Functions that run a module of experts: on few rows, and on so many that the kernel takes its larger tile."""
    num = len(new.down)
    each = min(2, num)
    for rows in (_ROWS, 16 * num // each):
        x, weights = random_rows(model, rows, new.stacks.out_features), random_rows(model, rows, each).abs()
        chosen = torch.arange(rows * each, device=x.device).view(rows, each) % num
        yield partial(_mixed, x, chosen, weights)


@torch.inference_mode()
def _mixed(x: Tensor, chosen: Tensor, weights: Tensor, module: nn.Module) -> Tensor:
    return cast("Tensor", module(x, chosen, weights))


def link(model: PreTrainedModel, trials: EquivalenceTests | None = None) -> int:
    """Let each layer compute its last sum together with the norm that reads it: the next layer's or the final norm.

    Returns the number of linked layers. If the list of a model's layers changes, call this again.
    """
    trials, count = trials or EquivalenceTests(), 0
    for name, stack in list(model.named_modules()):
        if not isinstance(stack, nn.ModuleList) or not all(isinstance(layer, KernelLayer) for layer in stack):
            continue
        layers = cast("list[KernelLayer]", list(stack))
        parent = model.get_submodule(name.rpartition(".")[0])
        final = [module for module in parent.children() if isinstance(module, KernelNorm)]
        readers = [(layer.norms[0],) for layer in layers[1:]] + [tuple(final) if len(final) == 1 else ()]
        for layer, reader in zip(layers, readers, strict=bool(layers)):
            layer.following = ()
            if reader and trials.agree("sums handed on", _handing(model, layer, reader), (), reader):
                layer.following = reader
                count += 1
    return count


def _handing(
    model: PreTrainedModel, layer: KernelLayer, reader: tuple[KernelNorm, ...]
) -> Callable[[tuple[KernelNorm, ...]], Tensor]:
    """Return a function that runs a layer and the norm that follows it, with or without handing the norm on."""

    def run(following: tuple[KernelNorm, ...]) -> Tensor:
        with _changed(layer, "following", following):
            out = _try(model, layer)
            return torch.cat([out, reader[0](out)], -1)

    return run


def round_ahead(model: PreTrainedModel, ops: object = None) -> Counter[str]:
    """Let the module that produces rows for a matmul in 8-bit floats also round them; returns how many of each kind.

    Norms and gates round where they are the last operation before a matmul. Elsewhere a separate kernel rounds.
    """
    found, trials, done = _ops(ops), EquivalenceTests(), Counter[str]()
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            changes: list[tuple[nn.Module, str, Any]] = [(module, "round_rows", found.round_rows)]
            done["matmuls"] += _change(model, "rounding", module, changes, trials)
        elif isinstance(module, KernelGate) and isinstance(module.down_proj, Fp8Linear):
            done["gates"] += _change(model, "gates that round", module, [(module, "rounds", True)], trials)
        elif isinstance(module, KernelLayer):
            norms = _read_by_fp8(module)
            done["norms"] += len(norms) * _change(
                model, "norms that round", module, [(norm, "rounds", True) for norm in norms], trials
            )
    log.info("rows are rounded ahead for %s", ", ".join(f"{count} {kind}" for kind, count in done.items()))
    return done


def _read_by_fp8(layer: KernelLayer) -> list[KernelNorm]:
    """Norms whose only reader is a matmul in 8-bit floats."""
    inner = cast("Any", layer.inner)
    attention, mlp = inner.self_attn, inner.mlp
    readers = (
        (layer.norms[0], attention.qkv if isinstance(attention, KernelAttention) else None),
        (layer.norms[2], mlp.both if isinstance(mlp, KernelGate) else None),
    )
    matmuls = [(norm, both.matmul if isinstance(both, Joined) else both) for norm, both in readers]
    return [norm for norm, matmul in matmuls if isinstance(matmul, Fp8Linear)]


def _change(
    model: PreTrainedModel,
    kind: str,
    module: nn.Module,
    changes: list[tuple[nn.Module, str, Any]],
    trials: EquivalenceTests,
) -> bool:
    """Set attributes of some modules, if `module` then still gives the same result."""

    def run(changed: bool) -> Tensor:
        with ExitStack() as whole:
            for where, name, value in changes if changed else ():
                whole.enter_context(_changed(where, name, value))
            return _try(model, module)

    agreed = bool(changes) and trials.agree(kind, run, False, True)
    for where, name, value in changes if agreed else ():
        setattr(where, name, value)
    return agreed


@contextmanager
def _changed(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value inside the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _norms(module: nn.Module, ops: LayerOps) -> list[nn.Module]:
    return [KernelNorm(module, ops)] if isinstance(module, RMSNorm) else []


def _gates(module: nn.Module, ops: LayerOps) -> list[nn.Module]:
    inner = cast("Any", getattr(module, "inner", module))  # `fuse` may have put its own module for CPUs here
    gate, down = getattr(inner, "gate_proj", None), getattr(inner, "down_proj", None)
    both = gate.joined if isinstance(gate, JoinedPart) else getattr(inner, "gate_up_proj", None)
    if not isinstance(both, nn.Module) or not isinstance(down, nn.Module):
        return []
    return [KernelGate(both, down, activation, ops) for activation in ("silu", "gelu_tanh")]


def _attentions(module: nn.Module, ops: LayerOps) -> list[nn.Module]:
    return [KernelAttention(module, ops)] if isinstance(module, RotaryAttention) else []


def _layers(module: nn.Module, _: LayerOps) -> list[nn.Module]:
    if not isinstance(getattr(module, "self_attn", None), nn.Module):
        return []
    norms = {name for name, child in module.named_children() if isinstance(child, KernelNorm)}
    return [KernelLayer(module, names) for names in NAMES if norms == set(names) - {None}]


_KINDS: dict[str, Callable[[nn.Module, LayerOps], list[nn.Module]]] = {
    "norms": _norms,
    "gates": _gates,
    "attentions": _attentions,
    "layers": _layers,
}


@torch.inference_mode()
def _try(model: PreTrainedModel, module: nn.Module) -> Tensor:
    """Run a module of any kind on random rows that are the same each time; only an attention returns a tuple."""
    hidden: int = model.config.get_text_config().hidden_size
    if isinstance(module, RMSNorm | KernelNorm):
        width = module.scale.numel()
    else:
        width = cast("int", getattr(module, "in_features", hidden))
    x = random_rows(model, 1, _ROWS, width)
    has_context = hasattr(module, "layer_idx") or hasattr(module, "self_attn")
    if not has_context:
        return cast("Tensor", module(x))
    batch = RaggedBatch.of([Feed([0] * _ROWS, 4, [0])], _PAGE, model.device)
    arena = KVArena(kv_layout(model.config, model.dtype), 1, _PAGE, model.device)
    positions = torch.arange(4, 4 + _ROWS, device=model.device)[None]
    out = module(
        hidden_states=x,
        position_embeddings=_rotary(model, x, positions),
        attention_mask=None,
        position_ids=positions,
        ragged=Ragged(batch, arena, reference.attend),
    )
    return cast("Tensor", out[0] if hasattr(module, "layer_idx") else out)


def _rotary(model: PreTrainedModel, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as the model computes them; for its first kind of layer where it has several."""
    rotary = cast("Any", model.get_decoder()).rotary_emb
    kinds = getattr(rotary, "layer_types", None)
    return cast("tuple[Tensor, Tensor]", rotary(x, positions, *sorted(kinds)[:1]) if kinds else rotary(x, positions))
