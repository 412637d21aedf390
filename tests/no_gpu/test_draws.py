"""What a plain step's draw costs on a card that is not there: operations and bytes, of tensors without values.

Kernels are counted and do nothing. torch must have been built for CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import GridExecutor

from engine.params import SamplingParams, Verification
from engine.sampling.verification import VerifyInput, verify_rows
from tests.engine.sampling.test_distribution import row
from tests.no_gpu import test_fake_tensors
from tests.no_gpu.test_fake_tensors import READS, Watch, pinned

pytestmark = test_fake_tensors.pytestmark
VOCAB, K = 128_256, 4
WHOLE = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.8, top_p=0.9)


class Costs(Watch):
    """Operations on the card, views aside, and the bytes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_cuda and not function.is_view]
        self.count += bool(made)
        self.bytes += sum(x.numel() * x.element_size() for x in made)
        return out


def cost_of(law: SamplingParams, rule: Verification, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Costs, int]:
    """Of one step of `size` sequences with `K` drafts each; and launches of our kernels."""
    launches = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launches.append(self))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    fed = []
    for seed in range(size):
        sequence = row(law, 5, seed).sequence
        sequence.speculation = replace(sequence.speculation, verification=rule)
        fed.append(VerifyInput(sequence, tuple(range(K))))
    with FakeTensorMode(), Costs() as costs:
        verify_rows(fed, torch.empty(size * (K + 1), VOCAB, device="cuda"))
    return costs, len(launches)


# Operations, and bytes for each of the logits' own: torch's noise alone took 340 and 130 of them.
MOST = {Verification.COUPLED: (45, 1.5), Verification.REJECTION: (105, 45)}


@pytest.mark.parametrize("rule", list(Verification))
@pytest.mark.parametrize(("law", "launches"), [(WHOLE, 3), (CUT, 10)])
def test_a_draw_is_a_handful_of_operations_for_any_batch(law, launches, rule, monkeypatch):
    """Nothing of it is waited for but its answer, and what a cut of the rejection rule keeps."""
    small, large = (cost_of(law, rule, size, monkeypatch) for size in (1, 16))
    most, times = MOST[rule]
    assert small[0].count == large[0].count <= most
    assert large[0].bytes <= times * 16 * (K + 1) * VOCAB * 4
    assert small[1] == large[1] == (launches if rule is Verification.COUPLED else 3)
    assert not large[0].waits
    assert large[0].reads.keys() <= READS
