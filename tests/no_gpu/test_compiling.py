"""What a card would find out late, found without one: every launch of whole engines, bound and compiled.

`compiling` runs once, in a process of its own; the tests read what it wrote.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from tests.no_gpu import program
from tests.no_gpu.budgets import BUDGETS, NOT_ON_SM_80

KERNELS = {
    name
    for path in (program.ROOT / "engine/kernels").glob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
}
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes that one block may have
pytestmark = [*program.MARKS, pytest.mark.slow]


@dataclass(frozen=True)
class Report:
    """What `compiling` wrote."""

    launched: list[dict[str, Any]]  # a specialisation that a part of a case launched
    compiled: dict[str, dict[str, Any]]  # what it takes, by its key
    on_sm_80: dict[str, dict[str, Any]]  # by kernel
    served: list[dict[str, Any]]
    equal: list[bool]  # tokens, to those of plain torch

    def variants(self) -> dict[tuple[str, str], set[str]]:
        """Keys of the specialisations by kernel and case, but for those of pages that only the probe at load has."""
        found = defaultdict(set)
        for line in self.launched:
            if line["part"] == "load":
                continue
            found[line["kernel"], line["case"]].add(line["key"])
        return found


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    # A cache of its own: what was compiled before this run has no part in it.
    told = program.output("compiling", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    lines = [json.loads(line) for line in told.splitlines()]
    return Report(
        launched=[line for line in lines if "part" in line],
        compiled={line["key"]: line for line in lines if "seconds" in line},
        on_sm_80={line["kernel"]: line for line in lines if "sm_80" in line},
        served=[line for line in lines if "done" in line],
        equal=[line["equals_plain"] for line in lines if "equals_plain" in line],
    )


def test_all_kernels_are_met(report) -> None:
    assert {line["kernel"] for line in report.launched} == KERNELS == set(BUDGETS)


def test_engines_did_everything(report) -> None:
    """Else what follows would say little."""
    done = Counter[str]()
    for line in report.served:
        done.update(line["done"])
    wanted = ("preemptions", "prompts beside others", "drafts kept", "ends before their time", "draft", "prefill")
    assert min(done[name] for name in wanted) > 0, done
    assert report.equal == [True]


def test_a_model_needs_few_specialisations(report) -> None:
    """Integers that a kernel is specialised on (1, multiples of 16) make many of what should be one."""
    beyond = {}
    for (kernel, case), keys in report.variants().items():
        budget = BUDGETS[kernel]
        kinds = 2 if budget.per_kind_of_layer and "gemma2" in case else 1
        if len(keys) > budget.variants * kinds:
            beyond[kernel, case] = (len(keys), "of", budget.variants * kinds, *map(plainly, sorted(keys)))
    assert not beyond


def test_no_compile_in_a_request(report) -> None:
    """What an engine launches for requests of any kind was compiled when it was warmed up."""
    new = [
        (line["case"], line["part"], plainly(line["key"]))
        for line in report.launched
        if line["part"] == "traffic" and line["is_new"]
    ]
    assert not new


def test_nothing_spills(report) -> None:
    found = {plainly(key): line["stack"] for key, line in report.compiled.items() if line["stack"] > budget(line).stack}
    assert not found


def test_enough_blocks_fit_on_a_multiprocessor(report) -> None:
    crowded = [
        (case, plainly(key), report.compiled[key])
        for (kernel, case), keys in report.variants().items()
        for key in keys
        if report.compiled[key]["blocks"] < BUDGETS[kernel].blocks
    ]
    assert not crowded


def test_shared_memory_of_one_block(report) -> None:
    for capability, lines in ((90, report.compiled.values()), (80, report.on_sm_80.values())):
        assert max(line["shared"] for line in lines) <= SHARED[capability]


def test_kernels_compile_for_sm_80(report) -> None:
    assert report.on_sm_80.keys() == KERNELS - NOT_ON_SM_80
    assert not [line for line in report.on_sm_80.values() if line["stack"] > budget(line).stack_on_sm_80]


def budget(line: dict[str, Any]):
    return BUDGETS[line["kernel"]]


def plainly(key: str) -> str:
    """Without the options, of which there are many: _gate_kernel *bf16:D *bf16:D i32 1536 1024 False."""
    name, _, rest = key.partition(" ")
    pairs = re.findall(r"\('([^']*)', ('[^']*'|[^)]*)\)", rest[: rest.find("{") if "{" in rest else None])
    words = [str(what).strip("'") if kind == "constexpr" else f"{kind}:{what}".rstrip(":'") for kind, what in pairs]
    return " ".join([name, *words]).replace(":'", ":").replace(":None", "")
