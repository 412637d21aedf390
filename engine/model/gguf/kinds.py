"""The types in which GGUF files store numbers: their names, and the sizes of their blocks (`ggml.h`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One type. A row of `weights * n` numbers takes `size * n` bytes."""

    name: str
    weights: int  # of a block; 1 where numbers are stored as floats
    size: int  # bytes of a block

    @property
    def is_float(self) -> bool:
        """Whether numbers are stored as floats, and not as codes."""
        return self.weights == 1


# By their numbers in files.
KINDS = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    30: BlockKind("BF16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
}
# Names of types that are not read, for messages.
_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def unreadable(number: int) -> str:
    """Name a type that is not read, and those that are."""
    known = ", ".join(kind.name for kind in KINDS.values())
    return f"{_OTHERS.get(number, f'type {number}')}, which is not read; what is read: {known}"
