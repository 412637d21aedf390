"""What cannot keep a row's bits apart from its neighbours is taken row by row, or refused at load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError, Unsupported
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.params import SpeculationParams, Verification
from pilotfish.engine.startup import build
from pilotfish.engine.startup.batch_invariance import TILE, Tiled, ensure_batch_invariance, is_independent
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import Request
from tests import zoo


class ByPlace(nn.Linear):
    """Rounds a row by its place, as a kernel with a remainder loop may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 1e-6 * torch.arange(x.shape[-2])[:, None])


class ByNeighbour(nn.Linear):
    """Rounds a row by the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-6 * x.roll(1, -2).mean(-1, keepdim=True)


class ByThreads(nn.Linear):
    """Even a single row hangs on the number of threads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * (1 + 1e-6 * self.calls)


@pytest.fixture
def model() -> torch.nn.Module:
    return zoo.ours(zoo.reference("llama"))


def spoil(model: torch.nn.Module, kind: type[nn.Linear]) -> None:
    old = model.model.layers[1].mlp.down_proj
    new = kind(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[1].mlp.down_proj = new


@pytest.mark.parametrize("kind", [ByPlace, ByNeighbour])
def test_a_matmul_that_fails_is_taken_row_by_row(model: torch.nn.Module, kind: type[nn.Linear]) -> None:
    spoil(model, kind)
    assert not is_independent(Tiled(model.model.layers[1].mlp.down_proj))
    ensure_batch_invariance(model, layout_of_model(model))
    assert [layer.mlp.down_proj.rows for layer in model.model.layers[:2]] == [TILE, 1]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 37])
def test_each_matmul_has_one_shape_with_padding(count: int) -> None:
    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape)
            return super().forward(x)

    seen: list[torch.Size] = []
    matmul, x = Seen(8, 5), torch.randn(1, count, 8)
    assert torch.allclose(Tiled(matmul)(x), nn.functional.linear(x, matmul.weight, matmul.bias), atol=1e-6)
    assert set(seen) == {(TILE if count else 0, 8)}


def test_a_matmul_that_fails_even_so_is_refused_by_its_shape(model: torch.nn.Module) -> None:
    spoil(model, ByThreads)
    with pytest.raises(ModelError, match=r"down_proj \(ByThreads 32 x 48 float32\)"):
        ensure_batch_invariance(model, layout_of_model(model))


def test_what_is_no_matmul_is_found_by_the_whole_model(model: torch.nn.Module) -> None:
    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1e-6 * x.mean(-2, keepdim=True)

    model.model.norm = nn.Sequential(model.model.norm, Mixing())
    with pytest.raises(ModelError, match="its position in the batch"):
        ensure_batch_invariance(model, layout_of_model(model))


def test_twice_is_once(model: torch.nn.Module) -> None:
    layout = layout_of_model(model)
    ensure_batch_invariance(model, layout)
    once = [name for name, _ in model.named_modules()]
    ensure_batch_invariance(model, layout)
    assert [name for name, _ in model.named_modules()] == once


def test_refused_where_no_order_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ours(zoo.reference("llama")).to("meta")
    with pytest.raises(ModelError, match="reproducible is not supported on"):
        assemble(EngineConfig(target="x", reproducible=True), model)
    monkeypatch.setattr(build, "has_triton", lambda: False)
    with pytest.raises(ModelError, match="requires Triton"):
        build._check_reproducible(EngineConfig(target="x", reproducible=True), torch.device("cuda"))


def test_a_server_with_rejection_as_its_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="coupled"):
        EngineConfig(target="x", reproducible=True, verification="rejection")


def test_a_request_for_rejection_is_refused(model: torch.nn.Module) -> None:
    engine = assemble(EngineConfig(target="x", reproducible=True), model)
    for rule in (None, *Verification):
        request = Request(request_id="r", token_ids=(1,), speculation=SpeculationParams(verification=rule))
        if rule is Verification.REJECTION:
            with pytest.raises(Unsupported, match=r"speculation\.verification is 'rejection'.*reproducible"):
                engine.check(request)
        else:
            engine.check(request)
