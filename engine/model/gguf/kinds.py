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
    10: BlockKind("Q2_K", 256, 84),
    11: BlockKind("Q3_K", 256, 110),
    20: BlockKind("IQ4_NL", 32, 18),
    23: BlockKind("IQ4_XS", 256, 136),
    39: BlockKind("MXFP4", 32, 17),
    16: BlockKind("IQ2_XXS", 256, 66),
    17: BlockKind("IQ2_XS", 256, 74),
    22: BlockKind("IQ2_S", 256, 82),
    18: BlockKind("IQ3_XXS", 256, 98),
    21: BlockKind("IQ3_S", 256, 110),
    19: BlockKind("IQ1_S", 256, 50),
    29: BlockKind("IQ1_M", 256, 56),
    34: BlockKind("TQ1_0", 256, 54),
    35: BlockKind("TQ2_0", 256, 66),
}
# Names of types that are not read, for messages.
_OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}


def unreadable(number: int) -> str:
    """Name a type that is not read, and those that are."""
    known = ", ".join(kind.name for kind in KINDS.values())
    return f"{_OTHERS.get(number, f'type {number}')}, which is not read; what is read: {known}"
