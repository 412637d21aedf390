"""The engine's options without pydantic, for a GPU machine with its own Python: the same names and defaults.

Nothing is validated here; use `engine.config` otherwise. A test checks that both have the same options.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from pilotfish.engine.params import SpeculationMode, Verification

if TYPE_CHECKING:
    from pilotfish.engine.config import EngineConfig

DEFAULTS: dict[str, Any] = {
    "max_prompt_tokens": None, "max_output_tokens": None, "max_n": 64, "max_stops": 16, "max_stop_length": 256,
    "max_logprobs": 20, "max_total_logprobs": 1 << 18, "max_logit_bias": 1024, "max_structure_bytes": 64 << 10,
    "max_choices": 4096, "draft": (), "revision": None, "device": "auto", "dtype": "auto",
    "weights": "native", "draft_weights": None, "proposer": None,
    "num_draft_tokens": 8, "speculation": SpeculationMode.AUTO, "verification": Verification.COUPLED,
    "max_model_len": None, "max_batch_size": 64, "max_batch_tokens": 512, "max_step_ms": 250.0, "kv_memory": None,
    "engines_per_device": 1,
    "page_size": None, "prefix_cache": True, "attention": "auto", "loop": "auto", "reproducible": False,
    "warm_up_seconds": 4.0, "threads": None, "tensor_parallel_size": 1, "adapter": {}, "kv_cache_dtype": "auto",
}  # fmt: skip


def options(target: str, **chosen: Any) -> EngineConfig:
    """Return the options with the attributes of `EngineConfig(target=target, **chosen)`."""
    unknown = chosen.keys() - DEFAULTS.keys()
    assert not unknown, f"no options: {unknown}"
    made = DEFAULTS | chosen | {"target": target}
    made["speculation"] = SpeculationMode(made["speculation"])
    return cast("EngineConfig", SimpleNamespace(**made))
