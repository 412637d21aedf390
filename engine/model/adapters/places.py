"""Finds the matmuls that an adapter names in a model whose modules were joined and replaced. Knows no file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn

from engine.errors import ModelError
from engine.kv.latent import latent_of
from engine.model.decoder.attention import Joined, JoinedPart
from engine.model.decoder.decoder import DecoderModel
from engine.model.linear.fp8 import Fp8Linear
from engine.model.linear.rows import matmul_shape

_EXPANDING = "kv_b_proj"  # latents to keys and values
_ORIGINALS = ("inner",)  # where a replacement keeps what it replaces
_FP8 = "its rows are rounded to 8-bit floats before it gets them, and an adapter needs them as they were"


@dataclass(frozen=True, slots=True)
class Place:
    """A matmul of the checkpoint in the model that runs: the outputs from `start` on of `matmul`."""

    matmul: nn.Module
    start: int
    inputs: int
    outputs: int
    total: int  # outputs of the whole `matmul`
    order: Tensor | None = None  # which output in the checkpoint each output is; None where they are the same

    def ordered(self, b: Tensor) -> Tensor:
        """The rows of a matrix `[outputs, rank]` of the checkpoint, in the order of the outputs here."""
        return b if self.order is None else b[self.order]


def find_place(model: DecoderModel, path: str) -> Place:
    """The place of the matmul that the checkpoint has at `path`, as in `model.layers.0.self_attn.q_proj`.

    Raises:
        ModelError: the model has no matmul there, or it is one that adapters cannot change.
    """
    module: nn.Module | Place = model
    for name in _renamed(model, path).split("."):
        if name == _EXPANDING and isinstance(module, nn.Module) and latent_of(module) is not None:
            raise ModelError(f"{path!r} expands latents, kept as they are: name an adapter of it at start")
        found = None if isinstance(module, Place) else _child(module, name)
        if found is None:
            raise ModelError(f"{path!r} is no matmul of {type(model).__name__}: it has no {name!r} there")
        module = found
    place = module if isinstance(module, Place) else _place(module)
    if place is None:
        assert isinstance(module, nn.Module)
        raise ModelError(f"{path!r} of {type(model).__name__} is a {type(module).__name__}, and no matmul")
    if isinstance(place.matmul, Fp8Linear):
        raise ModelError(f"{path!r} has fp8 weights: {_FP8}")
    return place


def _renamed(model: DecoderModel, path: str) -> str:
    """The path in a decoder, whose names are the same in all families."""
    for pattern, becomes in model.architecture.names:
        path = re.sub(pattern, becomes, f"{path}.").removesuffix(".")
    return path


def _child(module: nn.Module, name: str) -> nn.Module | Place | None:
    """The module of this name in `module`, or in what it replaces."""
    children = dict(module.named_children())
    if name in children:
        return children[name]
    originals = (children[kept] for kept in _ORIGINALS if kept in children)
    return next((found for original in originals if (found := _child(original, name)) is not None), None)


def _place(module: nn.Module) -> Place | None:
    if isinstance(module, JoinedPart):
        return _part(module.joined, module.index, module.order)
    shape = matmul_shape(module)
    return None if shape is None else Place(module, 0, *shape, shape[1], getattr(module, "outputs_order", None))


def _part(joined: Joined, index: int, order: Tensor | None = None) -> Place:
    shape = matmul_shape(joined.matmul)
    assert shape is not None, "what was joined are matmuls"
    return Place(joined.matmul, sum(joined.sizes[:index]), shape[0], joined.sizes[index], shape[1], order)
