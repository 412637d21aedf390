"""What kernels are compiled to for a card that is not there: one object in JSON.

A program of its own, for kernels must be defined without the interpreter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from tests.no_gpu import attention_facts, rows_facts, sampling_facts
from tests.no_gpu.stand_in import Specialised, StandIn

SHAPES = (
    "bfloat16/4/128", "bfloat16/48/64", "bfloat16/2/256/256/windowed", "float32/8/128", "bfloat16/4/192/128",
    "bfloat16/8/512", "bfloat16/4/128/128/int8", "bfloat16/16/576/512/within/int8", "bfloat16/16/576/512/within",
)  # fmt: skip


def resources(specialised: Iterable[Specialised]) -> Iterator[dict[str, Any]]:
    """What each takes on sm_90, and what the largest of each kernel takes on sm_80."""
    largest: dict[str, tuple[int, Specialised]] = {}
    for each in specialised:
        found = each.resources
        yield {"kernel": each.name, "key": each.key, "card": 90, "blocks": found.blocks(90)} | asdict(found)
        if "fp8" not in each.key and found.shared >= largest.get(each.name, (0, each))[0]:  # which sm_80 does not have
            largest[each.name] = found.shared, each
    for name, (_, each) in largest.items():
        yield {"kernel": name, "key": each.key, "card": 80} | asdict(each.anew(80))


def main() -> None:
    stand_in = StandIn().install()
    told = {"shapes": list(attention_facts.shapes(stand_in, SHAPES))}
    beside = {each.name: each for each in stand_in.newest() if each.name != "_attend_kernel"}  # one of each is enough
    known = set(stand_in.seen)
    told |= rows_facts.facts(stand_in) | {"draws": sampling_facts.facts(stand_in)}
    others = [each for key, each in stand_in.seen.items() if key not in known or each.name == "_attend_kernel"]
    told |= {"resources": list(resources([*beside.values(), *others]))}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
