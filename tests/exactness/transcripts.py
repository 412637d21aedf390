"""Transcripts of requests, to show that a change of the code changes nothing that a caller can see.

    python -m tests.exactness.transcripts record FILE      run every case, and write what each request got
    python -m tests.exactness.transcripts compare OLD NEW  exit with 1 where they differ, or have too few requests

A transcript has tokens, text, log-probabilities to the last bit, finish reason, usage and statistics of speculation.
It has no time, and no statistics under AUTO, whose K follows from measured times. Record both files on one machine:
logits may differ in their last bits between processors. The module uses public names alone, so that it runs before and
after a change of what lies behind them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from pilotfish import client
from pilotfish.engine import LLM, SamplingParams, SpeculationParams
from pilotfish.models import corpus, embedded_draft, embedded_target
from tests import families, zoo

LEAST = 300  # requests
_ASKED = sys.modules[SamplingParams.__module__]
Guided, Mode, Verification = _ASKED.Guided, _ASKED.SpeculationMode, _ASKED.Verification
PROPOSERS = ("model", "ngram", "suffix", "self", "medusa", "eagle", "auto", "none")
SCHEMA = json.dumps({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                     "additionalProperties": False})  # fmt: skip
OPTIONS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.1, seed=1),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7, seed=2),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=3),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1, seed=4),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=1.2, logit_bias={7: 6.0, 9: 5.0}),
    "logit_bias": SamplingParams(logit_bias={7: 4.0, 11: 3.5, 300: -100.0}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=tuple(range(5, 400, 7))),
    "banned_token_ids": SamplingParams(banned_token_ids=tuple(range(0, 2048, 2))),
    "min_tokens": SamplingParams(min_tokens=9, stop_token_ids=tuple(range(100, 112)), logit_bias={105: 30.0}),
    "max_tokens": SamplingParams(max_tokens=5),
    "stop": SamplingParams(stop=("e", "zz")),
    "stop_token_ids": SamplingParams(temperature=1.0, seed=6, stop_token_ids=(5, 6, 7), logit_bias={6: 6.0}),
    "ignore_eos": SamplingParams(ignore_eos=True, logit_bias={0: 5.0}),
    "logprobs": SamplingParams(temperature=0.9, seed=5, logprobs=3),
    "prompt_logprobs": SamplingParams(prompt_logprobs=2, logprobs=0),
    "n": SamplingParams(n=3, temperature=1.0, seed=7),
    "json_schema": SamplingParams(guided=Guided(json_schema=SCHEMA), temperature=1.0, seed=8),
    "regex": SamplingParams(guided=Guided(regex="(ab|cd)+ [0-9]{3}"), temperature=1.0, seed=9),
    "grammar": SamplingParams(guided=Guided(grammar='start: "(" start ")" | /[xyz]+/'), temperature=1.0, seed=10),
    "choice": SamplingParams(guided=Guided(choice=("yes", "yesterday", "no", "not at all"))),
}
FIXED = {"threads": 1, "max_step_ms": 1e6}  # no chunk and no thread depends on how long anything takes
HEADS = (str(Path("models/medusa")), str(Path("models/eagle")), "self:2")


def prompts() -> list[str]:
    """Held-out code, cut to unequal lengths."""
    return [text[: 40 + 37 * i % 160] for i, text in enumerate(corpus.held_out_prompts(12))]


def asking(proposer: str, k: int, verification: str = "coupled") -> SpeculationParams:
    mode = Mode.FIXED if k else Mode.OFF
    return SpeculationParams(mode=mode, num_draft_tokens=k, proposer=proposer, verification=Verification(verification))


def shown(done: Any, *, with_statistics: bool = True) -> dict[str, Any]:
    """One completion of the offline API, floats as hexadecimal."""
    found = {
        "index": done.index, "text": done.text, "token_ids": list(done.token_ids),
        "logprobs": _logprobs(done.logprobs), "prompt_logprobs": _logprobs(done.prompt_logprobs),
        "finish_reason": str(done.finish_reason), "matched_stop": done.matched_stop, "seed": done.seed,
        "prompt_tokens": done.prompt_tokens, "cached_prompt_tokens": done.cached_prompt_tokens, "error": done.error,
    }  # fmt: skip
    if with_statistics:
        stats = done.stats
        found |= {
            "from_draft": list(done.from_draft), "rounds": stats.rounds, "drafted": stats.drafted,
            "accepted": stats.accepted, "accepted_per_position": list(stats.accepted_per_position),
        }  # fmt: skip
    return found


def _logprobs(given: Any) -> Any:
    if given is None:
        return None
    return [
        None if one is None else [one.logprob.hex(), [[top.token_id, top.logprob.hex()] for top in one.top]]
        for one in given
    ]


Case = tuple[str, list[dict[str, Any]]]


def options_alone(llm: LLM, name: str) -> Iterator[Case]:
    """Each option with three proposers, K of 1 to 8, and both rules by turns."""
    proposers, ks, rules = cycle(PROPOSERS[:7]), cycle(range(1, 9)), cycle(["coupled", "rejection"])
    for option, params in OPTIONS.items():
        for prompt in prompts()[:3]:
            params = replace(params, max_tokens=params.max_tokens or 20, seed=params.seed or 9)
            asked = asking(next(proposers), next(ks), next(rules))
            yield f"{name} {option} {asked}", [shown(d) for d in llm.generate(prompt, params, speculation=asked)]


def every_k(llm: LLM, name: str) -> Iterator[Case]:
    """Each proposer with K of 0 to 8."""
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3, logprobs=1)
    for proposer in PROPOSERS:
        for k in range(9):
            done = llm.generate(prompts()[k], params, speculation=asking(proposer, k))
            yield f"{name} {proposer} K={k}", [shown(d) for d in done]


def ragged(llm: LLM, name: str, proposer: str = "model", *, with_statistics: bool = True) -> Iterator[Case]:
    """Twelve prompts with as many options in one batch, twice: the second time over the prefix cache."""
    many = [replace(params, max_tokens=16, seed=params.seed or 9) for params in list(OPTIONS.values())[5:17]]
    asked = asking(proposer, 4) if with_statistics else SpeculationParams(mode=Mode.AUTO)
    for turn in range(2):
        done = llm.generate(prompts(), many, speculation=asked)
        for one, prompt in zip(done, prompts(), strict=True):
            yield f"{name} turn {turn} {prompt!r}", [shown(one, with_statistics=with_statistics)]


def of_families(folder: Path) -> Iterator[Case]:
    """Every family of the zoo in one ragged batch of chunked prompts, with a draft model and with lookups."""
    for family in zoo.FAMILIES:
        saved = families.save(family, folder / family)
        prompts = [case.prompt for case in saved.cases]
        for name, how in {"float32": {"dtype": "float32"}, "int8": {"weights": "int8"}}.items():
            llm = LLM(saved.target, saved.draft, max_batch_tokens=16, max_batch_size=4, **how, **FIXED)
            for proposer in ("model", "ngram"):
                params = SamplingParams(max_tokens=20, logprobs=1, temperature=0.6 * (proposer == "model"), seed=1)
                done = llm.generate(prompts, params, speculation=asking(proposer, 3))
                yield from ((f"{family} {name} {proposer} {i}", [shown(one)]) for i, one in enumerate(done))


def of_embedded_pair() -> Iterator[Case]:
    target, draft = embedded_target(), embedded_draft()
    every = [draft, *HEADS]
    whole = LLM(target, every, dtype="float32", **FIXED)
    yield from options_alone(whole, "float32")
    yield from every_k(whole, "float32")
    del whole
    small = {"max_batch_tokens": 24, "max_batch_size": 6, "page_size": 16}
    for name, how in {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"weights": "int8"},
                      "int4": {"weights": "int4"}}.items():  # fmt: skip
        yield from ragged(LLM(target, every, kv_memory=0.004, **small, **how, **FIXED), f"{name} chunked")
    rounds = LLM(target, draft, dtype="float32", loop="rounds", **FIXED)
    yield from ragged(rounds, "rounds")
    yield from ragged(LLM(target, draft, weights="int8", **FIXED), "auto", with_statistics=False)
    fixed = LLM(target, draft, dtype="float32", reproducible=True, prefix_cache=False, **FIXED)
    yield from ragged(fixed, "reproducible", "suffix")


def through_grpc() -> Iterator[Case]:
    """The embedded pair behind a server, by the Python client."""
    options = ["--grpc-port", "50977", "--http-port", "8977", "--threads", "1", "--max-step-ms", "1000000"]
    command = [
        sys.executable,
        "-c",
        "import sys; from pilotfish.server.cli import main; sys.exit(main())",
        "serve",
        *options,
    ]
    with subprocess.Popen(command) as server:
        try:
            with client.Client("127.0.0.1:50977") as connection:
                _wait_for(connection)
                for i, prompt in enumerate(prompts() * 3):
                    options = [{}, {"temperature": 0.8, "seed": i, "n": 2}, {"logprobs": True, "top_logprobs": 2}][
                        i % 3
                    ]
                    whole = connection.generate(
                        prompt, max_tokens=24, speculation="fixed", num_draft_tokens=1 + i % 8,
                        proposer=("model", "ngram", "suffix")[i // 12], **options,
                    )  # fmt: skip
                    yield f"gRPC {i}", [_of_client(output) for output in whole.outputs]
        finally:
            server.terminate()


def _wait_for(connection: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            connection.generate("x", max_tokens=1)
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
        else:
            return


def _of_client(output: Any) -> dict[str, Any]:
    stats, usage = output.finished.speculation_stats, output.finished.usage
    return {
        "text": output.text, "token_ids": list(output.token_ids), "from_draft": list(output.from_draft),
        "logprobs": _logprobs(output.logprobs), "finish_reason": str(output.finished.finish_reason),
        "usage": [usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens],
        "statistics": [stats.rounds, stats.drafted, stats.accepted, list(stats.accepted_per_position)],
    }  # fmt: skip


def record(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = dict([*of_embedded_pair(), *of_families(Path(folder)), *through_grpc()])
    file.write_text(json.dumps(cases, indent=1))
    print(len(cases), "requests")


def compare(old: Path, new: Path) -> int:
    was, now = (json.loads(file.read_text()) for file in (old, new))
    different = [name for name in was.keys() | now.keys() if was.get(name) != now.get(name)]
    for name in sorted(different):
        print(f"{name}\n  was {was.get(name)}\n  is  {now.get(name)}")
    print(f"{len(was)} and {len(now)} requests, {len(different)} different")
    return 1 if different or min(len(was), len(now)) < LEAST else 0


if __name__ == "__main__":
    command, *files = sys.argv[1:]
    sys.exit(record(Path(files[0])) if command == "record" else compare(Path(files[0]), Path(files[1])))
