"""What is measured: shapes and sizes, on a card or, tiny, on a CPU. Knows no torch, so that it loads at once."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all parts of a run."""

    device: str = "cuda"
    target: str = "8b"  # names of `engines.SHAPES`
    draft: str = "1b"
    sizes: tuple[int, ...] = (1, 8, 32)  # sequences
    auto_sizes: tuple[int, ...] = (1, 8, 32, 64, 128)
    context: int = 1024  # tokens of each prompt
    long_context: int = 8192  # of the attention kernel's tables
    prompts: tuple[int, ...] = (2048, 8192)  # tokens, of the table of prefill
    drawn: tuple[int, ...] = (1, 6, 48, 192)  # rows: a draft step, or a verification of one sequence, of 8 and of 32
    acceptance: float = 0.8
    low_acceptance: float = 0.3
    steps: int = 40  # timed
    strange: int = 120  # steps in which AUTO finds out what pays
    peer_tokens: tuple[int, int] = (16, 80)  # lengths of two runs, the difference of which counts
    requests: int = 8  # whose tokens are compared
    output: int = 24  # tokens of each

    @property
    def is_cuda(self) -> bool:
        """On a CPU it is a dry run: everything runs, no figure means anything."""
        return self.device == "cuda"

    @classmethod
    def of(cls, device: str, target: str, draft: str) -> Setting:
        """Sizes that go with these shapes."""
        return replace(_TINY if target == "tiny" else cls(), device=device, target=target, draft=draft)


_TINY = Setting(
    sizes=(1, 2), auto_sizes=(2,), context=24, long_context=70, prompts=(40,), drawn=(2,), steps=3, strange=4,
    peer_tokens=(2, 6), requests=4, output=4,
)  # fmt: skip
