"""vLLM on a processor, in bfloat16: its engine step by step, plainly or with a draft model of its own.

The engine runs in this process, so that its processor time is counted as its own. It is told once how many drafts to
make; another number would be another engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import Prompts, serve
from benchmarks.turns import Clock, Turn

_PASS = 512  # most tokens of a pass, as ours
# What its manual asks for on x86: Intel's OpenMP (from its own dependencies) instead of torch's.
_PRELOAD = ("libiomp5.so",)


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Its engine's, from settings: model, draft (or None), drafts, batch, length, cache (GB)."""
    told = {
        "model": settings["model"],
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": settings["length"],
        "max_num_seqs": settings["batch"],
        "max_num_batched_tokens": _PASS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": settings["cache"] * 2**30,
        "disable_log_stats": True,
    }
    if settings.get("draft"):
        told["speculative_config"] = {
            "method": "draft_model",
            "model": settings["draft"],
            "num_speculative_tokens": settings["drafts"],
        }
    return told


class VLLM:
    """Settings: those of `arguments`, and threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version = f"vllm {vllm.__version__}"
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments(settings)))
        self._next_id = 0

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """See `Program`."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        clock = Clock.of(len(prompts))
        places = {}
        for place, prompt in enumerate(prompts):
            places[str(self._next_id)] = place
            self._engine.add_request(str(self._next_id), {"prompt_token_ids": list(prompt)}, sampling)
            self._next_id += 1
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                clock.tokens[places[output.request_id]] = list(output.outputs[0].token_ids)
            clock.tick()
        return clock.turn()


def environment(threads: int, prefix: Path, had: dict[str, str]) -> dict[str, str]:
    """What has to be set before Python starts: threads that nobody binds to cores, and libraries loaded first."""
    found = [str(path) for name in _PRELOAD if (path := prefix / "lib" / name).exists()]
    before = [path for path in had.get("LD_PRELOAD", "").split(":") if path]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": ":".join(dict.fromkeys([*found, *before])),
    }


def main() -> None:
    """Start anew with the environment that vLLM wants, and serve."""
    import json

    wanted = environment(json.loads(sys.argv[1])["threads"], Path(sys.prefix), dict(os.environ))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm", *sys.argv[1:]], os.environ | wanted)  # noqa: S606 - itself
    serve(VLLM)


if __name__ == "__main__":
    main()
