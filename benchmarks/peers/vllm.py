"""vLLM on a CPU: its engine, step by step, with plain decoding or a draft model of its own.

    python -m benchmarks.peers.vllm export MODEL OUT

makes an int8 checkpoint from one in bfloat16, in the format of compressed-tensors: weights are quantised by output
channel, activations by token at run time. The output head is unchanged, because vLLM does not quantise it.

The engine runs in this process, so that its processor time counts as this process's own. The number of drafts is fixed
at the start; another number needs another engine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.turns import Clock, Turn
from benchmarks.peers.worker import Prompts, serve

_PASS = 512  # maximum tokens of a pass, as in Pilotfish
# vLLM's manual recommends this on x86: Intel's OpenMP (from its own dependencies) instead of torch's.
_PRELOAD = ("libiomp5.so",)

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel"},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments for: model, draft (or None), drafts, dtype, batch, length, cache (GB)."""
    found = {
        "model": settings["model"],
        "skip_tokenizer_init": True,
        "dtype": settings["dtype"],
        "max_model_len": settings["length"],
        "max_num_seqs": settings["batch"],
        "max_num_batched_tokens": _PASS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": settings["cache"] * 2**30,
        "disable_log_stats": True,
    }
    if settings.get("draft"):
        found["speculative_config"] = {
            "method": "draft_model",
            "model": settings["draft"],
            "num_speculative_tokens": settings["drafts"],
        }
    return found


class VLLM:
    """Settings: those of `arguments`, and threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version = f"vllm {vllm.__version__}"
        # For the operations that are not int8: without AVX512-BF16, torch's bfloat16 matmul is slow.
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 - as vLLM asks itself
        dtype = settings["dtype"] or ("bfloat16" if has_bfloat16 else "float32")
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments(settings | {"dtype": dtype})))
        self._next_id = 0

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """See `PeerProgram`."""
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


def export(model: Path, out: Path) -> None:
    """Write a checkpoint with weights in int8."""
    from safetensors.torch import load_file, save_file

    weights = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            weights[name] = (tensor.float() / scale).round().char()
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = tensor
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["quantization_config"] = QUANTIZATION
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")  # last: marks it complete


def environment(threads: int, prefix: Path, had: dict[str, str]) -> dict[str, str]:
    """Return variables that must be set before Python starts: threads without core binding, libraries to preload."""
    found = [str(path) for name in _PRELOAD if (path := prefix / "lib" / name).exists()]
    before = [path for path in had.get("LD_PRELOAD", "").split(":") if path]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": ":".join(dict.fromkeys([*found, *before])),
    }


def main() -> None:
    """Restart Python with the environment that vLLM needs, and serve."""
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    wanted = environment(json.loads(sys.argv[1])["threads"], Path(sys.prefix), dict(os.environ))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm", *sys.argv[1:]], os.environ | wanted)  # noqa: S606 - itself
    serve(VLLM)


if __name__ == "__main__":
    main()
