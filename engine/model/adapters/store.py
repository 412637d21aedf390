"""The adapters of a model: loads and unloads them by name, and maps the rows of a pass to them."""

from __future__ import annotations

import logging
import re
from collections import UserDict, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.adapters.peft import LoraMatrices, read_adapter
from pilotfish.engine.model.decoder.attention import JoinedPart
from pilotfish.engine.model.decoder.latent import latent_of
from pilotfish.engine.model.linear.cuda import Fp8Linear
from pilotfish.engine.model.linear.grouped import matmul_shape
from pilotfish.engine.model.linear.low_rank import (
    AdapterHook,
    LowRankProduct,
    PassRows,
    Products,
    block_diagonal,
    grouped,
)
from pilotfish.engine.types import Adapter

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel

log = logging.getLogger(__name__)

_TRANSPOSED = "gpt2"  # the family whose matrices are `[in, out]`
_EXPANDING = "kv_b_proj"  # latents to keys and values
_FP8 = "adapters require unrounded input rows"


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a checkpoint's matmul in the model: the outputs of `matmul` from `start`."""

    matmul: nn.Module
    start: int
    inputs: int
    outputs: int
    total: int  # outputs of the whole `matmul`
    order: Tensor | None = None  # index in the checkpoint of each output; None: equal


def find_place(model: DecoderModel, path: str) -> Place:
    """The location of the checkpoint's matmul `path`, for example `model.layers.0.self_attn.q_proj`.

    Raises:
        ModelError: the model has no such matmul, or adapters cannot change it.
    """
    module, own = cast("nn.Module", model), f"{path}."  # a decoder uses the same names for all families
    for pattern, becomes in model.architecture.names:
        own = re.sub(pattern, becomes, own)
    for name in own.removesuffix(".").split("."):
        if name == _EXPANDING and latent_of(module) is not None:
            raise ModelError(f"adapters of {path!r} (latent expansion) must be given at startup")
        children = dict(module.named_children())
        if name not in children:
            raise ModelError(f"{type(model).__name__} has no module {path!r}: {name!r} not found")
        module = children[name]
    part = module if isinstance(module, JoinedPart) else None
    matmul = module if part is None else part.joined.matmul
    shape = matmul_shape(matmul)
    if shape is None:
        raise ModelError(f"{path!r} of {type(model).__name__} is a {type(module).__name__}; expected a linear layer")
    if isinstance(matmul, Fp8Linear):
        raise ModelError(f"{path!r} has fp8 weights: {_FP8}")
    inputs, total = shape
    if part is None:
        return Place(matmul, 0, inputs, total, total, getattr(matmul, "outputs_order", None))
    sizes, index = part.joined.sizes, part.index
    return Place(matmul, sum(sizes[:index]), inputs, sizes[index], total, part.order)


@dataclass(frozen=True, eq=False)
class LoadedAdapter(Adapter):
    """An adapter in memory. Its weights are freed when neither a name nor a sequence refers to it."""

    products: Products


class Adapters(UserDict[str, LoadedAdapter]):
    """The loaded adapters by name. Loading and unloading happen between two passes."""

    def __init__(self, model: DecoderModel | None, *, row_wise: bool = True) -> None:
        """Prepare for adapters of `model`, which is unchanged until the first one is loaded; None: no adapters.

        `row_wise`: a row's bits do not depend on the number of rows, even where torch multiplies.
        """
        super().__init__()
        self._model, self._row_wise = model, row_wise
        self._by_number: WeakValueDictionary[int, LoadedAdapter] = WeakValueDictionary()
        self._numbers, self._hooks = count(1), dict[nn.Module, AdapterHook]()
        self._running: PassRows | None = None  # the rows of the current pass; None: none has an adapter

    def load(self, name: str, folder: Path, expected: str = "") -> LoadedAdapter:
        """Load the adapter in `folder` under `name`.

        `expected`: the required fingerprint; default any.

        Raises:
            ModelError: it cannot be served with this model; the message has the reason.
        """
        if name in self:
            raise ModelError(f"adapter {name!r} is loaded already; unload it first")
        loaded = self[name] = self.load_unlisted(name, folder, expected)
        return loaded

    def load_unlisted(self, name: str, folder: Path, expected: str = "") -> LoadedAdapter:
        """As `load`, but requests cannot name it, and it exists only while the caller holds it; `name` is for logs.

        Raises:
            ModelError: it cannot be served with this model; the message has the reason.
        """
        if self._model is None:
            raise ModelError(f"adapter {name!r}: adapters require an unsharded model of the table of architectures")
        try:
            loaded = self._read(self._model, name, folder, expected)
        except ModelError as error:
            raise ModelError(f"adapter {name!r}: {error}") from error
        self._by_number[loaded.number] = loaded
        log.info("adapter %r: %d linear layers", name, len(loaded.products))
        return loaded

    def unload(self, name: str) -> None:
        """Remove a name; sequences that use the adapter keep it. Raises ModelError if there is no such adapter."""
        if name not in self:
            raise ModelError(f"adapter {name!r} is not loaded")
        del self[name]

    @contextmanager
    def during(self, feeds: Seq[Feed]) -> Iterator[None]:
        """Context for a pass over `feeds`. Raises ValueError if a part of an adapter was not applied."""
        rows = self._running = self._rows(feeds) if any(feed.adapter for feed in feeds) else None
        try:
            yield
        finally:
            self._running = None
        if rows is not None:
            rows.check()

    def _rows(self, feeds: Seq[Feed]) -> PassRows:
        assert self._model is not None, "a feed has an adapter, but no model supports adapters"
        device = self._model.device
        spans = []
        for counts in ([len(feed.tokens) for feed in feeds], [feed.num_logits for feed in feeds]):
            ends = [*accumulate(counts, initial=0)]
            ranges = (range(start, stop) for start, stop in pairwise(ends))
            with_adapter = [(feed, span) for feed, span in zip(feeds, ranges, strict=True) if feed.adapter]
            found = [(self._by_number[feed.adapter].products, span) for feed, span in with_adapter]
            spans.append((grouped(found, device), ends[-1]))
        return PassRows(*spans[0], *spans[1])

    def _read(self, model: DecoderModel, name: str, folder: Path, expected: str) -> LoadedAdapter:
        """Read an adapter and map its matrices to the model's matmuls."""
        read = read_adapter(folder)
        if expected not in ("", read.fingerprint):
            raise ModelError(f"the files in {str(folder)!r} have changed since they were first loaded")
        if read.is_transposed and model.config.model_type != _TRANSPOSED:
            family = model.config.model_type
            raise ModelError(f"fan_in_fan_out is true, but the matrices of {family} models are not transposed")
        by_matmul: dict[nn.Module, list[tuple[Place, LoraMatrices]]] = defaultdict(list)
        for path, part in read.parts.items():
            place, found = find_place(model, path), (part.a.shape[1], len(part.b))
            if found != (place.inputs, place.outputs):
                wanted = f"expected {place.inputs} and {place.outputs}"
                raise ModelError(f"{path} has matrices for {found[0]} inputs and {found[1]} outputs; {wanted}")
            by_matmul[place.matmul].append((place, part))
        products = {matmul: self._product(model, matmul, parts) for matmul, parts in by_matmul.items()}
        return LoadedAdapter(name, next(self._numbers), read.fingerprint, products)

    def _product(
        self, model: DecoderModel, matmul: nn.Module, parts: list[tuple[Place, LoraMatrices]]
    ) -> LowRankProduct:
        if matmul not in self._hooks:
            is_head = matmul is model.get_output_embeddings()
            self._hooks[matmul] = AdapterHook(lambda: self._running, matmul, is_head=is_head)
        ordered = [(at.start, part.a, part.b if at.order is None else part.b[at.order]) for at, part in parts]
        a, b = block_diagonal(ordered, parts[0][0].total)
        dtype = torch.float32 if model.device.type == "cpu" else model.dtype
        return LowRankProduct(a.to(model.device, dtype), b.to(model.device, dtype), row_wise=self._row_wise)
