"""What is served of published models is near float32 of the same checkpoint, however its weights are rounded.

`make test-published` runs it. The limits are a half to twice more than what was measured (docs/benchmarks/quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.model.unbatched import plain_logits
from pilotfish.engine.startup.quality import compare, reference_model
from pilotfish.engine.text.codec import Codec
from pilotfish.models import published
from pilotfish.server.commands.quality import default_texts

pytestmark = pytest.mark.timeout(300)  # loads two models
_TEXTS, _LENGTH = 3, 128

# Those of one reference lie side by side: it is loaded once.
# Name, from the file or the checkpoint in bfloat16, weights, type, most KL in nats.
CASES = [
    ("smollm2", "file", "native", "auto", 0.0006),
    ("gemma-3", "file", "native", "auto", 0.0006),
    ("gemma-3", "file", "native", "bfloat16", 0.003),
    ("smollm2", "bfloat16", "native", "auto", 0.002),
    ("smollm2", "bfloat16", "int8", "auto", 0.0025),
    ("smollm2", "bfloat16", "int4", "auto", 0.006),
    ("gemma-3", "bfloat16", "native", "auto", 0.002),
    ("gemma-3", "bfloat16", "int8", "auto", 0.0025),
    ("gemma-3", "bfloat16", "int4", "auto", 0.2),
]


@cache
def texts(name: str) -> list[tuple[int, ...]]:
    codec = Codec.load(published.model(name))
    assert codec is not None
    return [codec.encode(text)[:_LENGTH] for text in default_texts()[:_TEXTS]]


def target(name: str, source: str) -> str:
    return str(published.model(name) if source == "file" else published.bfloat16(name))


@lru_cache(maxsize=1)
def wanted(name: str, source: str) -> dict[Seq[int], Tensor]:
    """The logits of each text in float32."""
    config = EngineConfig.model_validate({"target": target(name, source), "threads": 1})
    model = reference_model(config, config.target, print)
    with torch.inference_mode():
        return {text: plain_logits(model, list(text)) for text in texts(name)}


@pytest.mark.parametrize(("name", "source", "weights", "dtype", "most"), CASES)
def test_what_is_served_is_near_float32(name: str, source: str, weights: str, dtype: str, most: float) -> None:
    settings = {"target": target(name, source), "weights": weights, "dtype": dtype, "threads": 1}
    found = compare(EngineConfig.model_validate(settings), texts(name), wanted(name, source).__getitem__)
    print(found)
    assert found.kl < most
    assert abs(found.served_nll - found.reference_nll) < max(0.01, 2 * most)
