"""Writes results: one JSON file per section, and one Markdown page made from all of these files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.lab import Row, Section

# Sections are measured at different times, so the page is rebuilt from the files each time.
_HEAD = """# On CPU, on models of chosen acceptance

`make bench` writes this page from the files in `{folder}/`. Each section can also be measured alone.

    make bench                                    # everything: about two hours on two cores
    make bench ARGS="grid --rounds 3 --batches 1 4"
    make bench ARGS="peers --peers-python PATH"   # other programs: see benchmarks/peers/README.md
    pilotfish bench MODEL --draft DRAFT           # plain, fixed K and AUTO on any pair, in a minute

Published models beside llama.cpp, and the quality of both, are on [a page of their own](quality.md#speed), which
`python -m benchmarks.published` measures. The weights of this page are planted and say nothing about quality.

Passes of 16 families, before and after each ran in our own decoder, are on [another](families.md).

The embedded pair has its own pages, on [every K](embedded-cpu.md), [every proposer](proposers-cpu.md) and
[`auto`](drafters-cpu.md).

Models have random weights of the named shapes. One rule is planted in the weights: it says which token follows
which (`benchmarks/harness/synthetic.py`). The models do all of their normal work. Every program must return the
same text at every precision, and each turn checks this. Where drafts are replayed (`benchmarks/harness/replay.py`),
the draft model runs so that its cost counts; its tokens are then replaced by tokens that are right at the
acceptance rate of the row. Decoding is greedy and ignores end tokens. A *way* is one program or setting that is
compared. Ways take turns within a round (step by step where a section says so), and ratios compare turns of the
same round. *Foreign cores* is the number of cores that other processes used, or that the host took away, in the
worst turn of the row. Rows above 0.1 are unreliable.
"""


def write(section: Section, rows: Sequence[Row], folder: Path, conditions: Mapping[str, Any]) -> None:
    """Store the results, draw the plots, and rebuild the page."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = list(section.plot(rows, folder)) if find_spec("matplotlib") else []
    found = {"section": section.name, **conditions, "pictures": pictures, "rows": list(rows)}
    (folder / f"{section.name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def write_page(sections: Sequence[Section], folder: Path) -> None:
    """Write `folder.md` from the JSON files in `folder`, in the order of `sections`; the page has the folder's name."""
    parts = [_HEAD.format(folder=folder.name)]
    for section in sections:
        path = folder / f"{section.name}.json"
        if path.exists():
            parts.append(part(section, json.loads(path.read_text("utf-8")), folder.name))
    folder.with_suffix(".md").write_text("\n".join(parts), "utf-8")


def part(section: Section, found: Mapping[str, Any], folder: str) -> str:
    """Return one section of the page."""
    lines = [f"## {section.title}", "", f"`{found['command']}`", ""]
    lines += [f"{found['machine']}; {found['versions']}; commit {found['commit']}; {found['models']}.", ""]
    lines += [*section.verdict(found["rows"]), ""] if found["rows"] else []
    lines += [section.explain, "", *table(section.columns, found["rows"]), ""]
    lines += [line for name in found["pictures"] for line in (f"![{name}]({folder}/{name})", "")]
    return "\n".join(lines)


def table(columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    """Return a table in Markdown; a cell is empty if its row lacks the column."""
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(_cell(form, row) for form in columns.values()) + " |" for row in rows]


def _cell(form: str, row: Row) -> str:
    try:
        return form.format(**row)
    except KeyError:
        return ""
