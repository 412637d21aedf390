"""What a card would find out late, found without one: how often whole engines would compile, and when.

`compiling` runs once, in a process of its own; the tests read what it wrote.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.no_gpu import program
from tests.no_gpu.budgets import BUDGETS

pytestmark = [*program.MARKS, pytest.mark.slow]


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What `compiling` wrote."""
    return [json.loads(line) for line in program.output("compiling").splitlines()]


def test_engines_did_everything(told) -> None:
    """Else what follows would say little. In float32 what was launched meant what plain torch says."""
    done = Counter[str]()
    for line in told:
        done.update(line.get("done", {}))
    wanted = ("preemptions", "prompts beside others", "drafts kept", "ends before their time", "draft", "prefill")
    assert min(done[name] for name in wanted) > 0, done
    assert [line["equals_plain"] for line in told if "equals_plain" in line] == [True]


def test_a_model_needs_few_specialisations(told) -> None:
    """Integers that a kernel is specialised on (1, multiples of 16) make many of what should be one.

    Not counted are those of pages that only the probe at load has.
    """
    variants = defaultdict(set)
    for line in told:
        if line.get("part", "load") != "load":
            variants[line["kernel"], line["case"]].add(plainly(line["key"]))
    beyond = {}
    for (kernel, case), keys in variants.items():
        budget = BUDGETS[kernel]
        most = budget.variants * (2 if budget.per_kind_of_layer and "gemma2" in case else 1)
        if len(keys) > most:
            beyond[kernel, case] = (len(keys), "of", most, *sorted(keys))
    assert variants
    assert not beyond


def test_no_compile_in_a_request(told) -> None:
    """What an engine launches for requests of any kind was compiled when it was warmed up."""
    launched = [line for line in told if line.get("part") == "traffic"]
    assert launched
    assert not [(line["case"], plainly(line["key"])) for line in launched if line["is_new"]]


def plainly(key: str) -> str:
    """Without the options, of which there are many: _gate_kernel *bf16:D *bf16:D i32 1536 1024 False."""
    name, _, rest = key.partition(" ")
    pairs = re.findall(r"\('([^']*)', ('[^']*'|[^)]*)\)", rest[: rest.find("{") if "{" in rest else None])
    words = [str(what).strip("'") if kind == "constexpr" else f"{kind}:{what}".rstrip(":'") for kind, what in pairs]
    return " ".join([name, *words]).replace(":'", ":").replace(":None", "")
