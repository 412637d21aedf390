"""Measure the costs and the speed-up of Pilotfish on this machine, by sections.

python -m benchmarks                                   all sections
python -m benchmarks verify grid --rounds 3            some sections
python -m benchmarks --shape tiny --tokens 16          small models, to test that the benchmarks run
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.lab import BenchOptions, Lab, Section
from benchmarks.harness.machine import machine
from benchmarks.harness.synthetic import SHAPES
from benchmarks.sections import grid, peer_prompts, peers, server, verify

PAGE = "cpu"
SECTIONS: tuple[Section, ...] = (
    verify.SECTION,
    grid.SECTION,
    server.SECTION,
    peers.SECTION,
    *peer_prompts.SECTIONS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure section by section; write each result as soon as it is available."""
    options = _parser().parse_args(arguments)
    wanted = [section for section in SECTIONS if not options.sections or section.name in options.sections]
    lab = Lab(_options(options))
    command = " ".join(["python -m benchmarks", *(sys.argv[1:] if arguments is None else arguments)])
    for section in wanted:
        lab.tell(section.title)
        rows = section.measure(lab)
        conditions = {"command": command, **machine(), "models": _models(lab.options)}
        report.write(section, rows, options.out / PAGE, conditions)
        report.write_page(SECTIONS, options.out / PAGE)
        print("\n".join([*(section.verdict(rows) if rows else ()), "", *report.table(section.columns, rows), ""]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, d = [section.name for section in SECTIONS], BenchOptions()
    parser.add_argument("sections", nargs="*", choices=[*names, []], help="sections to run; default: all")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder of the results")
    parser.add_argument("--models", type=Path, default=d.models, help="folder of the synthetic models")
    parser.add_argument("--shape", dest="target", choices=SHAPES, default=d.target, help="shape of the target")
    parser.add_argument("--draft-shape", dest="draft", choices=SHAPES, default=d.draft, help="shape of the draft")
    parser.add_argument("--agreement", type=float, default=d.agreement, help="acceptance of the synthetic draft")
    parser.add_argument("--threads", type=int, default=d.threads, help="default: the cores this process may use")
    parser.add_argument("--rounds", type=int, default=d.rounds, help="number of measured rounds, after one for warm-up")
    parser.add_argument("--prompt", type=int, default=d.prompt, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=d.tokens, help="output tokens")
    parser.add_argument("--kv-memory", type=float, default=d.kv_memory, help="GiB for keys and values, per engine")
    parser.add_argument("--peers", nargs="*", help="other programs, by (part of) name; default: Pilotfish only")
    parser.add_argument(
        "--peers-python",
        nargs="+",
        default=d.peers_python,
        metavar="PATH",
        help="a Python that has the peers installed; MODULE=PATH for one that has another",
    )
    parser.add_argument("--neighbours", type=int, nargs="+", default=d.neighbours, help="busy processes beside peers")
    for name, of in (("batches", int), ("rates", float), ("contexts", int), ("drafts", int)):
        parser.add_argument(f"--{name}", type=of, nargs="+", help="default: set by the section")
    return parser


def _options(parsed: argparse.Namespace) -> BenchOptions:
    given = {name: value for name, value in vars(parsed).items() if name in BenchOptions.__dataclass_fields__}
    kept: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return replace(BenchOptions(), **kept)


def _models(options: BenchOptions) -> str:
    pair = (
        f"{options.target} with a draft of {options.draft} (agrees at {options.agreement:g} where it is not replayed)"
    )
    return f"{pair}, int8, prompts of {options.prompt} tokens, outputs of {options.tokens}"


if __name__ == "__main__":
    main()
