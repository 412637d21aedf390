"""What kernels are compiled to for a card that is not there: one object in JSON.

A program of its own, for kernels must be defined without the interpreter.
"""

from __future__ import annotations

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

from tests.no_gpu import attention_facts, compiling, rows_facts, sampling_facts
from tests.no_gpu.stand_in import StandIn

SHAPES = (
    "bfloat16/4/128", "bfloat16/48/64", "float32/4/128", "float32/8/128", "bfloat16/4/192/128", "bfloat16/8/512",
    "bfloat16/16/576/512/within",
)  # fmt: skip


def main() -> None:
    stand_in, told, met = StandIn(90).install(), {}, set[str]()
    for part in (
        lambda: {
            "batches": attention_facts.batches(stand_in),
            "shapes": list(attention_facts.shapes(stand_in, SHAPES)),
        },
        lambda: rows_facts.facts(stand_in),
        lambda: {"draws": sampling_facts.facts(stand_in)},
        lambda: compiling.launch_as_8b() or {},
    ):
        told |= part()
        met |= {compiled.name for compiled in stand_in.seen.values()}
        stand_in.seen.clear()
    print(json.dumps(told | {"kernels": sorted(met)}))


if __name__ == "__main__":
    main()
