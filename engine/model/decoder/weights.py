"""Reads the weights of a checkpoint for a decoder: rounds them or keeps codes, joins and packs them.

Source weights stay mapped from their files and are converted one matrix at a time, so that memory never holds all of
them twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.choices import Rounded, Weights
from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.mapped import release_mapped
from pilotfish.engine.model.linear.cuda import Fp8Linear, W4Linear
from pilotfish.engine.model.linear.grouped import GroupedLinear, PackedLinear, SideBySide
from pilotfish.engine.model.linear.rounding import bits_of, round_weight
from pilotfish.engine.model.published.base import CodedEmbedding, Codes, of_groups
from pilotfish.engine.native import PackedMatrix, multiplies, rows_for
from pilotfish.engine.native.weights import GroupedCodes, are_finite

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.architecture import Architecture

CPU = torch.device("cpu")
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARED = "model.shared."  # for weights shared by several layers
SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|gate_up_proj|down_proj)\.weight")


class Embedding(nn.Embedding):
    """A table of floats, whose rows are multiplied by a scale (Gemma)."""

    def __init__(self, weight: Tensor, scale: float | None) -> None:
        nn.Module.__init__(self)  # torch's constructor would initialise a weight
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.embed_scale: Tensor | None
        self.register_buffer("embed_scale", None if scale is None else torch.tensor(scale), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[...]` -> rows `[..., width]`."""
        found = super().forward(ids)
        return found if self.embed_scale is None else found * self.embed_scale.to(found.dtype)


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Weights by their names in a float checkpoint, and their target format.

    Attributes:
        weights: floats, and codes as published or saved.
        dtype: of weights that are neither rounded nor quantised.
        rounded: rounding of float matrices; None: they stay floats.
        keeps_codes: whether matmuls keep codes that our kernels support.
        device: of floats; codes are on a CPU.
        packs: use our C for floats if possible; else torch.
        converted: the class that replaces torch's matmul if its sizes are supported; not for the output matrix.
        codes: if given, stores the weights that are rounded here, by name.
        path: prefix of names.
        shared: matmuls shared by several layers, by name.
    """

    weights: Mapping[str, Tensor | Codes]
    dtype: torch.dtype
    rounded: Rounded | None = None
    keeps_codes: bool = True
    device: torch.device = CPU
    packs: bool = True
    converted: type[Fp8Linear | W4Linear] | None = None
    codes: dict[str, GroupedCodes] | None = None
    path: str = ""
    shared: dict[tuple[str, ...], nn.Module] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)  # of `shared`

    def below(self, path: str) -> WeightReader:
        return replace(self, path=self.path + path)

    def vector(self, name: str, *size: int) -> Tensor:
        """A vector of floats, for example of a norm."""
        found = self.weights[self.path + name]
        vector = found if isinstance(found, Tensor) else found.dequantised()
        return vector.view(size).to(self.device, self.dtype)

    def floats(self, name: str, *size: int) -> Tensor:
        """A weight of this shape, dequantised if it is quantised."""
        found = self.weights[self.path + name]
        return (found if isinstance(found, Tensor) else found.dequantised()).view(size).to(self.device)

    def matrix(
        self,
        outputs: Mapping[str, int],
        inputs: int,
        *,
        has_bias: bool,
        orders: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """The matrices of these names, with the same input rows of width `inputs`, as one matmul.

        `outputs`: of each. `orders`: by name, index in the checkpoint of each output. `dtype`: of products in our C;
        default that of rows.
        """
        names = [*outputs]
        if not self.path.startswith(SHARED):
            return self._matrix(names, has_bias=has_bias, orders=orders or {}, dtype=dtype)
        with self._lock:  # layers are read by several threads
            key = (self.path, *names)
            if key not in self.shared:
                self.shared[key] = self._matrix(names, has_bias=has_bias, orders=orders or {})
            return self.shared[key]

    def _matrix(
        self, names: Seq[str], *, has_bias: bool, orders: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> nn.Module:
        weights = [self.weights[f"{self.path}{name}.weight"] for name in names]
        biases = [self._bias(f"{self.path}{name}") if has_bias else None for name in names]
        made = self._joined(names, weights, biases, orders, dtype)
        if len(names) == 1 and names[0] in orders:
            made.outputs_order = orders[names[0]]  # for adapters
        return made

    def experts(
        self, stack: str, parts: Seq[str], count: int, outputs: int, inputs: int, *, has_bias: bool, transposed: bool
    ) -> list[nn.Module]:
        """A matmul for each of `count` experts, from a stack or from each expert's separate `parts`.

        `outputs`: of an expert, over all parts.
        `transposed`: matrices of a stack of floats are `[inputs, outputs]`.
        """
        found = self.weights.get(self.path + stack)
        saved = [self.weights.get(f"{self.path}{expert}.{stack}.weight") for expert in range(count)]
        if found is None and None in saved:
            each = dict.fromkeys(parts, outputs // len(parts))
            return [self.below(f"{expert}.").matrix(each, inputs, has_bias=has_bias) for expert in range(count)]
        biases: Seq[Tensor | None] = [None] * count
        if has_bias:
            biases = self.floats(f"{stack}_bias", count, outputs).unbind()
        matrices: Seq[Tensor | Codes]
        if found is None:
            matrices = cast("Seq[Codes]", saved)
        elif isinstance(found, Codes) and found.matrices:
            matrices = found.matrices
        else:
            floats = found if isinstance(found, Tensor) else found.dequantised()
            matrices = (floats.transpose(1, 2) if transposed else floats).unbind()
        return [self._joined([f"{i}.{stack}"], [matrices[i]], [biases[i]], {}) for i in range(count)]

    def _joined(
        self,
        names: Seq[str],
        weights: list[Tensor | Codes],
        biases: list[Tensor | None],
        orders: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        if self.rounded is not None or all(map(self._keeps, weights)):
            made = [
                self._codes(self.path + name, weight, bias)
                for name, weight, bias in zip(names, weights, biases, strict=True)
            ]
            each = zip(names, made, strict=True)
            return SideBySide.of([matmul.of_rows(orders[name]) if name in orders else matmul for name, matmul in each])
        for index, name in enumerate(names):
            if name in orders:
                weights[index] = self._plain(weights[index])[orders[name]]
                bias = biases[index]
                biases[index] = None if bias is None else bias[orders[name]]
        return self._floats(weights, biases, dtype)

    def table(self, name: str, rows: int, size: int, scale: float) -> nn.Module:
        """A table `[rows, size]`, whose rows are multiplied by `scale`."""
        whole = f"{self.path}{name}.weight"
        return self._table(whole, self.weights[whole], None, scale)

    def head_and_table(self, architecture: Architecture) -> tuple[nn.Module, nn.Module]:
        """The output matrix, whose products are float32, and the embedding table."""
        scale = architecture.embedding_scale
        head, table = (
            self.weights[name if name in self.weights else other] for name, other in ((HEAD, TABLE), (TABLE, HEAD))
        )
        is_shared = head is table or (isinstance(head, Tensor) and isinstance(table, Tensor) and _same(head, table))
        # Logits must be in float32: rounded to bfloat16, many would be equal.
        is_coded = self.rounded is not None or self._keeps(head)
        bias = self._bias("lm_head") if architecture.head_bias else None
        made = (
            self._codes("lm_head", head, bias, torch.float32)
            if is_coded
            else self._floats([head], [bias], torch.float32)
        )
        codes = replace(made.codes, bias=None) if is_shared and isinstance(made, GroupedLinear) else None
        return made, self._table(TABLE, table, codes, scale)

    def _table(self, name: str, table: Tensor | Codes, shared: GroupedCodes | None, scale: float | None) -> nn.Module:
        """An embedding table; `shared`: codes of a tied output matrix."""
        if self._keeps(table) and table.rows is not None:
            return CodedEmbedding(table, self.dtype, scale)
        if self.rounded is None:
            return Embedding(self._plain(table), scale)
        weight = table if isinstance(table, Tensor) else self._plain(table)
        codes = shared or self._rounded(name, weight, bits_of(self.rounded, "", weight))
        return CodedEmbedding(of_groups(codes), self.dtype, scale)

    def _keeps(self, weight: Tensor | Codes) -> TypeGuard[Codes]:
        return self.keeps_codes and isinstance(weight, Codes) and weight.num_bytes is not None

    def _codes(
        self, name: str, weight: Tensor | Codes, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> GroupedLinear:
        """A matmul of codes: the checkpoint's, or floats rounded here."""
        if self._keeps(weight):
            assert weight.grouped is not None, "codes without a packed form"
            try:
                return GroupedLinear(replace(weight.grouped(), bias=bias), dtype)
            except ValueError as error:
                raise ModelError(f"{name}.weight: {error}") from error
        assert self.rounded is not None
        floats = weight if isinstance(weight, Tensor) else self._plain(weight)
        bits = bits_of(self.rounded, name, floats, is_head=name == "lm_head")
        return GroupedLinear(self._rounded(f"{name}.weight", floats, bits, bias), dtype)

    def _rounded(self, key: str, floats: Tensor, bits: int, bias: Tensor | None = None) -> GroupedCodes:
        codes = round_weight(floats, bits, bias)
        if not are_finite(codes.scale):
            raise ModelError(f"{key} has NaN or infinite values")
        release_mapped(floats)
        if self.codes is not None:
            self.codes[key] = codes
        return codes

    def _floats(self, weights: Seq[Tensor | Codes], biases: Seq[Tensor | None], dtype: torch.dtype | None) -> nn.Module:
        """A matmul of floats, in our C if supported."""
        parts = [self._plain(weight) for weight in weights]
        bias = None if biases[0] is None else torch.cat([cast("Tensor", bias) for bias in biases])
        made: nn.Module
        if (
            self.packs
            and self.device.type == "cpu"
            and multiplies(self.dtype)
            and rows_for(self.dtype, parts[0].shape[1]) is not None
        ):
            made = PackedLinear(PackedMatrix.of(parts, None if bias is None else bias.float()), dtype)
        else:
            made = linear(parts[0] if len(parts) == 1 else torch.cat(parts), bias)
            becomes = self.converted if dtype is None else None
            if becomes is not None and becomes.fits(made.in_features, made.out_features):
                made = becomes(made)
        for part in parts:
            release_mapped(part)
        return made

    def _plain(self, weight: Tensor | Codes) -> Tensor:
        return (weight if isinstance(weight, Tensor) else weight.dequantised()).to(self.device, self.dtype)

    def _bias(self, name: str) -> Tensor:
        found = self.weights[f"{name}.bias"]
        assert isinstance(found, Tensor), "biases are not rounded"
        return found.to(self.device, self.dtype)


def converted_by(weights: Weights, *, on_cuda: bool) -> type[Fp8Linear | W4Linear] | None:
    """The class that replaces torch's matmuls for this weight format."""
    return Fp8Linear if weights == "fp8" else W4Linear if weights == "int4" and on_cuda else None


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A torch matmul, for a matrix that our C does not support."""
    made = nn.Linear(1, 1, bias=False, device="meta")  # on the CPU it would initialise a weight
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return made


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


def fused_name(key: str) -> str:
    """The name of the stack with the matrix of an expert; other names are unchanged."""
    found = SINGLE.fullmatch(key)
    return key if found is None else f"{found[1]}.{'down_proj' if found[3] == 'down_proj' else 'gate_up_proj'}"
