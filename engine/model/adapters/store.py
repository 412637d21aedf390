"""The adapters of a model: loads and drops them by name, and tells the matmuls which row of a pass has which."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import nn

from engine.errors import ModelError
from engine.kv.batch import Feed
from engine.model.adapters.peft import LoraMatrices, read_adapter
from engine.model.adapters.places import Place, find_place
from engine.model.linear.low_rank import (
    AdapterHook,
    AdapterPass,
    LowRankProduct,
    PassRows,
    Products,
    block_diagonal,
    grouped,
)
from engine.types import Adapter

if TYPE_CHECKING:
    from engine.model.decoder.decoder import DecoderModel

log = logging.getLogger(__name__)

_TRANSPOSED = "gpt2"  # the family whose matrices are `[in, out]`


@dataclass(frozen=True, eq=False)
class LoadedAdapter(Adapter):
    """An adapter in memory. Its weights are freed when neither a name nor a sequence refers to it any more."""

    products: Products


class Adapters(Mapping[str, LoadedAdapter]):
    """The loaded adapters by name. Loading and unloading happen between two passes."""

    def __init__(self, model: DecoderModel | None, *, row_wise: bool = True) -> None:
        """Prepare for adapters of `model`, which does not change before the first one is loaded; None: there are none.

        `row_wise`: also where torch multiplies, a row's bits do not depend on the number of rows.
        """
        self._model, self._row_wise = model, row_wise
        self._by_name: dict[str, LoadedAdapter] = {}
        self._by_number: WeakValueDictionary[int, LoadedAdapter] = WeakValueDictionary()
        self._numbers, self._current = count(1), AdapterPass()
        self._hooks: dict[nn.Module, AdapterHook] = {}

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def load(self, name: str, folder: Path, expected: str = "") -> LoadedAdapter:
        """Load the adapter in `folder` under `name`.

        `expected`: the fingerprint that it has to have; default any.

        Raises:
            ModelError: it cannot be served with this model; the message says why.
        """
        if name in self._by_name:
            raise ModelError(f"adapter {name!r} is loaded already; unload it first")
        loaded = self._by_name[name] = self.load_unlisted(name, folder, expected)
        return loaded

    def load_unlisted(self, name: str, folder: Path, expected: str = "") -> LoadedAdapter:
        """As `load`, but no request can name it, and it stays only as long as the caller keeps it; `name` is for logs.

        Raises:
            ModelError: it cannot be served with this model; the message says why.
        """
        if self._model is None:
            raise ModelError(f"adapter {name!r}: a target in shards, or whose sequences run one at a time, has none")
        try:
            loaded = self._read(self._model, name, folder, expected)
        except ModelError as error:
            raise ModelError(f"adapter {name!r}: {error}") from error
        self._by_number[loaded.number] = loaded
        log.info("adapter %r changes %d matmuls", name, len(loaded.products))
        return loaded

    def unload(self, name: str) -> None:
        """Forget a name; the sequences that have the adapter keep it. Raises ModelError if there is no such adapter."""
        if name not in self._by_name:
            raise ModelError(f"adapter {name!r} is not loaded")
        del self._by_name[name]

    def during(self, feeds: Seq[Feed]) -> AbstractContextManager[None]:
        """Within it the model runs a pass over `feeds`."""
        if not any(feed.adapter for feed in feeds):
            return nullcontext()
        return self._current.running(self._rows(feeds))

    def _rows(self, feeds: Seq[Feed]) -> PassRows:
        assert self._model is not None, "who has an adapter?"
        device = self._model.device
        spans = []
        for counts in ([len(feed.tokens) for feed in feeds], [feed.num_logits for feed in feeds]):
            ends = [0, *_sums(counts)]
            ranges = (range(start, stop) for start, stop in pairwise(ends))
            with_adapter = [(feed, span) for feed, span in zip(feeds, ranges, strict=True) if feed.adapter]
            found = [(self._by_number[feed.adapter].products, span) for feed, span in with_adapter]
            spans.append((grouped(found, device), ends[-1]))
        return PassRows(*spans[0], *spans[1])

    def _read(self, model: DecoderModel, name: str, folder: Path, expected: str) -> LoadedAdapter:
        """Read an adapter and bring its matrices to the matmuls that run."""
        read = read_adapter(folder)
        if expected not in ("", read.fingerprint):
            raise ModelError(f"the files in {str(folder)!r} are not those that were loaded first")
        if read.is_transposed and model.config.model_type != _TRANSPOSED:
            family = model.config.model_type
            raise ModelError(f"fan_in_fan_out is true, and the matrices of a {family} model are not transposed")
        by_matmul: dict[nn.Module, list[tuple[Place, LoraMatrices]]] = defaultdict(list)
        for path, part in read.parts.items():
            place, found = find_place(model, path), (part.a.shape[1], len(part.b))
            if found != (place.inputs, place.outputs):
                wanted = f"it has {place.inputs} inputs and {place.outputs} outputs"
                raise ModelError(f"its matrices of {path} are for {found[0]} inputs and {found[1]} outputs; {wanted}")
            by_matmul[place.matmul].append((place, part))
        products = {matmul: self._product(model, matmul, parts) for matmul, parts in by_matmul.items()}
        return LoadedAdapter(name, next(self._numbers), read.fingerprint, products)

    def _product(
        self, model: DecoderModel, matmul: nn.Module, parts: list[tuple[Place, LoraMatrices]]
    ) -> LowRankProduct:
        if matmul not in self._hooks:
            is_head = matmul is model.get_output_embeddings()
            self._hooks[matmul] = AdapterHook(self._current, matmul, is_head=is_head)
        a, b = block_diagonal(
            [(place.start, part.a, place.ordered(part.b)) for place, part in parts], parts[0][0].total
        )
        dtype = torch.float32 if model.device.type == "cpu" else model.dtype
        return LowRankProduct(a.to(model.device, dtype), b.to(model.device, dtype), row_wise=self._row_wise)


def _sums(counts: Seq[int]) -> Iterator[int]:
    total = 0
    for number in counts:
        total += number
        yield total
