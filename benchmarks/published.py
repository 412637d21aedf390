"""Published models beside llama.cpp, from the same file: speed and, in the same run, quality.

    python -m benchmarks.published --peers-python .venv-peers/bin/python       smollm2 and gemma-3, all cores
    python -m benchmarks.published smollm2 --threads 1 --rounds 5

`make published` fetches the models. Both programs read the same token ids, of Python's manual and library; they decode
greedily, without drafts. Decoding is timed from the first token on, prompts until it. Programs take turns within a
round; speeds are medians, ratios medians of those of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.machine import machine
from benchmarks.harness.report import table
from benchmarks.harness.turns import Turn, foreign
from benchmarks.peers.remote import NotMeasured, Remote
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.machine.threads import cores
from pilotfish.engine.model.unbatched import plain_logits
from pilotfish.engine.startup.quality import Differences, Quality, measure, reference_model
from pilotfish.engine.text.codec import Codec
from pilotfish.models import published
from pilotfish.server.commands.quality import default_texts

BATCHES = (1, 8)
OURS, LLAMA = "pilotfish", "llama.cpp"
_PROMPT, _TOKENS, _LONG = 64, 64, 512  # of a sequence that is decoded; of a prompt that is timed
_TEXTS, _LENGTH = 4, 256  # that are compared with float32
_COLUMNS = {
    "model": "{model}",
    "program": "{program}",
    **{f"batch {n}, tokens/s": f"{{batch_{n}:.1f}}" for n in BATCHES},
    f"prompt of {_LONG}, tokens/s": "{prompt:.0f}",
    "ours over it": "{ratios}",
    "KL to float32": "{kl:.5f}",
    "same token": "{same_top:.2%}",
    "loss": "{loss:+.4f}",
    "foreign cores": "{foreign:.2f}",
}


def main(arguments: Seq[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*published.MODELS, []], help="default: all")
    parser.add_argument("--peers-python", help="a Python that has llama-cpp-python; default: ours alone")
    parser.add_argument("--threads", type=int, default=cores(), help="default: %(default)s, the cores")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args(arguments)
    rows = [row for name in options.models or published.MODELS for row in PublishedBench(name, options).rows()]
    conditions = {**machine(), "threads": options.threads, "rounds": options.rounds}
    print("\n".join([", ".join(f"{name} {value}" for name, value in conditions.items()), "", *table(_COLUMNS, rows)]))
    if options.out is not None:
        options.out.write_text(json.dumps(conditions | {"rows": rows}, indent=1) + "\n", "utf-8")


class PublishedBench:
    """One model and the programs that run it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options, self._file = name, options, str(published.model(name))
        codec = Codec.load(self._file)
        assert codec is not None, "a GGUF file has its tokenizer"
        self._ids = [token for text in default_texts() for token in codec.encode(text, bare=True)]
        self._start = codec.encode("")  # some models are lost without the token that begins a text
        self._taken = 0

    def rows(self) -> list[dict[str, Any]]:
        """A row for each program."""
        quality, speeds = self._qualities(), self._speeds()
        rows = []
        for program, turns in speeds.items():
            found = quality[program]
            medians = {name: statistics.median(map(_speed, each)) for name, each in turns.items()}
            pairs = [zip(speeds[OURS][name], turns[name], strict=True) for name in turns]
            ratios = [statistics.median(_speed(a) / _speed(b) for a, b in each) for each in pairs]
            extra = {} if program == OURS else {"ratios": ", ".join(f"{ratio:.2f}" for ratio in ratios)}
            rows.append(
                {"model": self._name, "program": program, **medians, **extra, **asdict(found)}
                | {"loss": found.served_nll - found.reference_nll}
                | {"foreign": foreign([turn for each in turns.values() for turn in each])}
            )
        return rows

    def _piece(self, length: int) -> tuple[int, ...]:
        """Return `length` tokens: the beginning of a text, and a part of the texts that no program has read yet."""
        fresh = length - len(self._start)
        if self._taken + fresh > len(self._ids):
            self._taken = 0
        self._taken += fresh
        return (*self._start, *self._ids[self._taken - fresh : self._taken])

    def _speeds(self) -> dict[str, dict[str, list[Turn]]]:
        """By program and by what was timed."""
        with tempfile.TemporaryDirectory() as logs:
            remotes = dict(self._programs(Path(logs)))
            try:
                for remote in remotes.values():
                    remote.ready()
                turns = {program: dict[str, list[Turn]]() for program in remotes}
                for name, prompts, tokens in self._work():
                    for program, found in self._timed(remotes, prompts, tokens).items():
                        turns[program][name] = found
                return turns
            finally:
                for remote in remotes.values():
                    remote.close()

    def _work(self) -> Iterator[tuple[str, Callable[[], list[tuple[int, ...]]], int]]:
        for batch in BATCHES:
            yield f"batch_{batch}", partial(lambda n: [self._piece(_PROMPT) for _ in range(n)], batch), _TOKENS
        yield "prompt", lambda: [self._piece(_LONG)], 1

    def _timed(
        self, remotes: Mapping[str, Remote], prompts: Callable[[], list[tuple[int, ...]]], tokens: int
    ) -> dict[str, list[Turn]]:
        """Run turns of all programs; each round has new prompts, because earlier ones may be cached."""
        turns: dict[str, list[Turn]] = {program: [] for program in remotes}
        for number in range(self._options.rounds + 1):
            wanted = prompts()
            for program in list(remotes)[:: -1 if number % 2 else 1]:
                turn = remotes[program].run(wanted, tokens, 0)
                turns[program] += [turn] if number else []  # the first round warms up
        return turns

    def _programs(self, logs: Path) -> Iterator[tuple[str, Remote]]:
        threads, length, batch = self._options.threads, _LONG + 64, max(BATCHES)
        ours = {"target": self._file, "max_batch_size": batch, "max_model_len": length, "kv_memory": 1.0}
        yield OURS, Remote(sys.executable, "benchmarks.peers.ours", ours | {"threads": threads}, logs / "ours")
        if self._options.peers_python:
            theirs = {"model": self._file, "draft": None, "batch": batch, "length": length, "threads": threads}
            yield LLAMA, Remote(self._options.peers_python, "benchmarks.peers.llama", theirs, logs / "llama")

    def _qualities(self) -> dict[str, Quality]:
        """By program."""
        texts = [self._piece(_LENGTH) for _ in range(_TEXTS)]
        config = EngineConfig.model_validate({"target": self._file, "threads": self._options.threads})
        found = {OURS: measure(config, texts)}
        if self._options.peers_python:
            plain, theirs = reference_model(config, self._file, lambda _: None), Differences()
            for text in texts:
                with torch.inference_mode():
                    wanted = plain_logits(plain, list(text))
                theirs.add(wanted, self._logits_of_llama(text), text)
            found[LLAMA] = theirs.result()
        return found

    def _logits_of_llama(self, text: Seq[int]) -> torch.Tensor:
        with tempfile.NamedTemporaryFile() as out:
            arguments = [self._file, out.name, ",".join(map(str, text))]
            command = [self._options.peers_python, "-m", "benchmarks.peers.llama", "logits", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotMeasured(f"llama.cpp: {done.stderr.strip().splitlines()[-1]}")
            return torch.from_numpy(np.fromfile(out.name, np.float32).reshape(len(text), -1))


def _speed(turn: Turn) -> float:
    """Return tokens per second of decoding or, if only one token was requested, of the prompt."""
    return turn.speed if turn.decode_tokens else _LONG / turn.seconds


if __name__ == "__main__":
    main()
