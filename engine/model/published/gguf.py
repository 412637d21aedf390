"""The weights of a GGUF file by transformers' names: blocks of codes are used by our integer kernels unchanged.

llama.cpp's converter renames weights and changes a few: it reorders the rows of Llama's queries and keys for the
rotation of adjacent pairs, adds 1 to Gemma's norms, and separates the two halves of the experts' first matrices. All of
this is undone here, on codes without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache, partial

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.mapped import release_mapped
from pilotfish.engine.model.gguf.blocks import codes_of, dequantised, raw_of, size_of_codes
from pilotfish.engine.model.gguf.container import Container, StoredTensor
from pilotfish.engine.model.gguf.families import GATE_UP, GGUFFamily, family_of, part_of
from pilotfish.engine.model.gguf.keys import TABLES, Keys
from pilotfish.engine.model.published.base import Codes, Weights, fused
from pilotfish.engine.native.weights import GroupedCodes

_STACKED = 3  # dimensions of the matrices of all experts of a layer


def weights_in(container: Container) -> Weights:
    """All weights of the model in a file, by transformers' names, read lazily.

    Raises:
        ModelError: the file has a tensor that its family does not have.
    """
    keys = Keys(container)
    family, stored = family_of(keys), dict[str, list[StoredTensor]]()
    layers = set(map(str, range(keys.layers)))
    drafting = tuple(f"blk.{layer}." for layer in range(keys.layers, keys.blocks))
    for name, tensor in sorted(container.tensors.items()):  # the gates of experts first
        if name in TABLES or name.startswith(drafting):
            continue
        renamed = family.renamed(name, layers)
        if renamed is None:
            model = f"{family.model_type} model of {keys.blocks} layers"
            raise ModelError(f"{container.path}: unexpected tensor {name} in a {model}")
        stored.setdefault(renamed, []).append(tensor)
    return {name: _weight(keys, family, tensors) for name, tensors in stored.items()}


def _weight(keys: Keys, family: GGUFFamily, tensors: Seq[StoredTensor]) -> Tensor | Codes:
    """A weight with the rows of these tensors, without the converter's changes."""
    first, part = tensors[0], part_of(tensors[0].name)
    is_stack, in_pairs = len(first.shape) == _STACKED, family.pairs_experts and part.endswith("_exps")
    order, undo, axis = _order(keys, family, first), family.undone(part), -1 if in_pairs and not is_stack else 0

    def floats(parts: Seq[StoredTensor], raws: Seq[Tensor]) -> Tensor:
        several = [dequantised(x.kind, raw) for x, raw in zip(parts, raws, strict=True)]
        found = several[0] if len(several) == 1 else torch.cat(several, axis)
        ordered = found if order is None else found.index_select(axis, order(found.shape[axis]))
        return ordered if undo is None else undo(ordered)

    if is_stack and (not first.kind.is_float or len(tensors) > 1 or in_pairs):
        experts = ([x.part(expert) for x in tensors] for expert in range(first.shape[0]))
        return fused([_matrix(parts, order, floats) for parts in experts], transposed=in_pairs)
    if first.kind.is_float:  # a stack of floats in one tensor stays in the file
        return floats(tensors, [raw_of(x) for x in tensors])
    return _matrix(tensors, order, floats)


def _matrix(
    tensors: Seq[StoredTensor],
    order: Callable[[int], Tensor] | None,
    floats: Callable[[Seq[StoredTensor], Seq[Tensor]], Tensor],
) -> Codes:
    """A matrix that is stored in blocks of codes, or as floats in several tensors."""
    first, shape = tensors[0], (sum(x.shape[0] for x in tensors), *tensors[0].shape[1:])
    size = size_of_codes(first.kind) if len({x.kind for x in tensors}) == 1 else None
    mapped = cache(partial(raw_of, first))  # once for all rows that are looked up

    def plain() -> Tensor:
        raws = [raw_of(x) for x in tensors]
        found = floats(tensors, raws)
        _release(raws)
        return found

    def grouped() -> GroupedCodes:
        raws = [raw_of(x) for x in tensors]
        codes = codes_of(first.kind, *raws)
        if len(raws) > 1:  # one is released when it is packed
            _release(raws)
        return codes if order is None else codes.rows(order(shape[0]))

    def rows(ids: Tensor) -> Tensor:
        return dequantised(first.kind, mapped()[ids]).float()

    num_bytes = None if size is None else sum(x.num_weights for x in tensors) // first.kind.weights * size
    return Codes(shape, plain, num_bytes, grouped, rows if order is None and len(tensors) == 1 else None)


def _release(raws: Seq[Tensor]) -> None:
    for raw in raws:
        release_mapped(raw)


def _order(keys: Keys, family: GGUFFamily, tensor: StoredTensor) -> Callable[[int], Tensor] | None:
    part = part_of(tensor.name)
    heads = {"attn_q": keys.heads, "attn_k": keys.kv_heads}
    if family.pairs_experts and part in GATE_UP:
        return lambda count: torch.arange(count).view(2, -1).t().reshape(-1)
    if family.permuted and part in heads:
        made = partial(_halves, heads[part])
    elif part in family.order:
        made = partial(family.order[part], keys)
    else:
        return None

    def order(count: int) -> Tensor:
        try:
            return made(count)
        except RuntimeError as error:
            raise ModelError(f"{tensor.path}: {tensor.name} has {count} rows, not a multiple of its heads") from error

    return order


def _halves(heads: int, count: int) -> Tensor:
    """Reorder adjacent pairs of each head into two halves.

    A head of 4: file rows [0, 1, 2, 3] are the pairs (0, 2) and (1, 3) of the weight -> [0, 2, 1, 3].
    """
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)
