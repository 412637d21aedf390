"""The settings of a run: shapes and sizes, for a GPU or, tiny, for a CPU. Does not import torch, to load fast."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all parts of a run share."""

    device: str = "cuda"
    target: str = "8b"  # names of `engines.SHAPES`
    draft: str = "1b"
    sizes: tuple[int, ...] = (1, 8, 32)  # sequences
    auto_sizes: tuple[int, ...] = (1, 8, 32, 64, 128)
    context: int = 1024  # tokens of each prompt
    long_context: int = 8192  # for the tables of the attention kernel
    prompts: tuple[int, ...] = (2048, 8192)  # tokens, for the table of prefill
    drawn: tuple[int, ...] = (1, 6, 48, 192)  # rows: a draft step, or a verification of one sequence, of 8 and of 32
    acceptance: float = 0.8
    low_acceptance: float = 0.3
    steps: int = 40  # timed steps
    strange: int = 120  # steps in which AUTO learns the best K
    calibration: float = 4.0  # seconds, a server's default
    peer_tokens: tuple[int, int] = (16, 80)  # output lengths of two runs, whose difference is measured
    requests: int = 8  # number of requests whose tokens are compared
    output: int = 24  # output tokens of each request

    @property
    def is_cuda(self) -> bool:
        """Return whether the run is on a GPU. On a CPU it is a dry run, whose figures mean nothing."""
        return self.device == "cuda"

    @classmethod
    def of(cls, device: str, target: str, draft: str) -> Setting:
        """Return the sizes that fit these shapes."""
        return replace(_TINY if target == "tiny" else cls(), device=device, target=target, draft=draft)


_TINY = Setting(
    sizes=(1, 2), auto_sizes=(2,), context=24, long_context=40, prompts=(40,), drawn=(2,), steps=3, strange=2,
    calibration=0.1, peer_tokens=(2, 6), requests=4, output=4,
)  # fmt: skip
