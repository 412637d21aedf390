"""A program for torchrun: the requests of `test_shares.py`, by engines whose targets are held by all ranks together."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from pilotfish.engine import parallel
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.llm import LLM, CompletionOutput
from pilotfish.engine.machine.rank import RankInfo
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from tests import zoo

NEW_TOKENS, LONGEST = 16, 96
parallel._FRAME = 512  # so that some messages are longer
LAWS = (
    SamplingParams(max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=5, n=3),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=1.3, top_k=20, min_p=0.02, seed=7, n=3, prompt_logprobs=1),
    SamplingParams(max_tokens=NEW_TOKENS, repetition_penalty=1.3, logprobs=1),
)
ASKED = (("none", 0), ("model", 1), ("ngram", 4), ("model", 8))  # the later ones find what the first has cached
COUNTED = ("preempted", "prefix_hits", "accepted", "drafted", "draft_failures")


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of unequal lengths, each with one of the laws."""
    return [(prompt, LAWS[i % len(LAWS)]) for i, prompt in enumerate(zoo.prompts(18))]


def said(completions: list[CompletionOutput]) -> list[dict[str, Any]]:
    """What must be the same, as JSON has it."""
    kept = ("token_ids", "finish_reason", "logprobs", "prompt_logprobs")
    return json.loads(json.dumps([{name: asdict(done)[name] for name in kept} for done in completions]))


def watch(llm: LLM) -> Counter[str]:
    """What steps will have done, so that a test can see that it was what it is about."""
    counts: Counter[str] = Counter()
    ranks, step = llm.engine.runner._ranks, llm.engine.step
    broadcast = ranks.broadcast

    def counting() -> Any:
        output = step()
        counts.update({name: getattr(output.stats, name) for name in COUNTED})
        return output

    def saying(feeds: Seq[Feed]) -> None:
        counts["longest_message"] = max(counts["longest_message"], len(msgspec.msgpack.encode(feeds, enc_hook=list)))
        broadcast(feeds)

    llm.engine.step, ranks.broadcast = counting, saying
    return counts


def run(folder: Path, **options: Any) -> dict[str, Any]:
    """All requests at once, with one proposer after the other. Other ranks end here, by SystemExit."""
    llm = LLM(folder / "target", folder / "draft", tensor_parallel_size=2, max_model_len=LONGEST, **options)
    counts = watch(llm)
    prompts, laws = zip(*requests(), strict=True)
    came = {}
    for proposer, k in ASKED:
        mode = SpeculationMode.FIXED if k else SpeculationMode.OFF
        asked = SpeculationParams(mode=mode, num_draft_tokens=k, proposer=proposer)
        came[f"{proposer}, K={k}"] = said(llm.generate(prompts, laws, speculation=asked))
        llm.engine.check_invariants()
    llm.engine.runner._ranks.broadcast([])  # so that the others come back, for the next family
    return {"came": came, "counts": counts, "kv_heads": llm.engine.runner._inner.arena.layout.layers[0].heads}


def main(folder: Path, families: dict[str, dict[str, Any]]) -> None:
    """Each family with its options; rank 0 writes what came of it."""
    for family, options in families.items():
        with suppress(SystemExit):
            brought = run(folder / family, **options)
            assert RankInfo.here().leads, "another rank than the first got an engine"
            (folder / family / "out.json").write_text(json.dumps(brought), "utf-8")
    dist.destroy_process_group()  # else its threads may still run when the process ends, and abort it


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
