"""The metadata and small tables of one file, by the keys of its architecture."""

from __future__ import annotations

from torch import Tensor

from engine.errors import ModelError
from engine.model.gguf.blocks import dequantised, raw_of
from engine.model.gguf.container import Container


class Keys:
    """The metadata of a file whose keys begin with its architecture."""

    def __init__(self, container: Container) -> None:
        self.container, self._prefix = container, container.need("general.architecture", str)

    def need(self, key: str) -> int:
        """A number that the family always has."""
        return self.container.need(f"{self._prefix}.{key}", int)

    def needs_real(self, key: str) -> float:
        """As `need`, of a number that is no integer."""
        return self.container.need(f"{self._prefix}.{key}", float)

    def real(self, key: str, default: float | None = None) -> float | None:
        """A number; `default` where the file has none."""
        return default if (found := self.container.get(f"{self._prefix}.{key}", float)) is None else found

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number; `default` where the file has none."""
        return default if (found := self.container.get(f"{self._prefix}.{key}", int)) is None else found

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value; `default` where the file has none."""
        return default if (found := self.container.get(f"{self._prefix}.{key}", bool)) is None else found

    def text(self, key: str) -> str | None:
        """A text; None where the file has none."""
        return self.container.get(f"{self._prefix}.{key}", str)

    def of_layers(self, key: str) -> list[int]:
        """A number for each layer, where a file may also have one for all of them."""
        found = self.container.metadata.get(f"{self._prefix}.{key}")
        return found if isinstance(found, list) else [self.need(key)] * self.need("block_count")

    def refuse(self, key: str, why: str) -> None:
        """Raise ModelError where a number of the metadata is there and not 0."""
        if self.container.metadata.get(f"{self._prefix}.{key}"):
            raise ModelError(f"{self.container.path}: {self._prefix}.{key} is set: {why}")

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return name in self.container.tensors

    @property
    def layers(self) -> int:
        """Layers, without those behind them that only draft."""
        return self.need("block_count") - (self.integer("nextn_predict_layers") or 0)

    @property
    def heads(self) -> int:
        """Heads of the queries."""
        return self.need("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, of the layers that have any.

        Raises:
            ModelError: they have different numbers.
        """
        several = self.container.metadata.get(f"{self._prefix}.attention.head_count_kv")
        if not isinstance(several, list):
            return self.integer("attention.head_count_kv", self.heads) or self.heads
        found = {number for number in several if number}
        if len(found) != 1:
            raise ModelError(f"{self.container.path}: attention.head_count_kv is {several}; expected one number, and 0")
        return int(found.pop())

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.integer("attention.key_length") or self.need("embedding_length") // self.heads

    def table(self, name: str) -> Tensor | None:
        """A small table of floats; None where the file has none."""
        tensor = self.container.tensors.get(name)
        return None if tensor is None else dequantised(tensor.kind, raw_of(tensor)).float()
