"""OpenVINO GenAI: its continuous batching, step by step, with plain decoding or its own speculative decoding.

    python -m benchmarks.peers.openvino export MODEL OUT BITS

converts a checkpoint to OpenVINO's format with optimum-intel, with weights in int8 or int4.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.turns import Clock, Turn
from benchmarks.peers.worker import Prompts, serve

_END = 2  # it requires an end token, even to ignore it


class OpenVINO:
    """Settings: model, draft (or None), threads, batch, cache (GB)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino_genai as genai

        self.version = f"openvino-genai {genai.get_version()}"
        self._genai = genai
        self._next_id = 0
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if settings.get("draft"):
            properties["draft_model"] = genai.draft_model(settings["draft"], "CPU", **properties)
        self._pipeline = genai.ContinuousBatchingPipeline(
            settings["model"], self._scheduler(settings), "CPU", properties
        )

    def _scheduler(self, settings: dict[str, Any]) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = settings["cache"]
        scheduler.max_num_seqs = settings["batch"]
        scheduler.max_num_batched_tokens = 512  # as in Pilotfish
        scheduler.enable_prefix_caching = False
        return scheduler

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """See `PeerProgram`."""
        import numpy as np
        import openvino as ov

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        config.set_eos_token_id(_END)
        if k:
            config.num_assistant_tokens = int(k)
        clock = Clock.of(len(prompts))
        handles = []
        for prompt in prompts:
            handles.append(self._pipeline.add_request(self._next_id, ov.Tensor(np.array([prompt], np.int64)), config))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for made, handle in zip(clock.tokens, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        made.extend(output.generated_ids)
            clock.tick()
        return clock.turn()


def export(model: Path, out: Path, bits: int) -> None:
    """Trace a checkpoint and quantise its weights: int8 by output channel, int4 in groups of 128."""
    import openvino as ov
    import openvino_tokenizers
    import transformers
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    how = {"sym": True} if bits == 8 else {"sym": False, "group_size": 128, "ratio": 1.0}
    rounding = OVWeightQuantizationConfig(bits=bits, **how)
    made = OVModelForCausalLM.from_pretrained(str(model), export=True, quantization_config=rounding, compile=False)
    # OpenVINO's speculative decoding compares the vocabularies of both tokenizers.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(model))
    both = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
        ov.save_model(part, out / f"openvino_{name}.xml")
    made.save_pretrained(str(out))


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        serve(OpenVINO)
