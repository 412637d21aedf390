"""Measure Pilotfish on a GPU, relative to the limits of its memory and matmuls, and beside other programs.

    python -m benchmarks.cuda first-light --out build/light      the main parts, most important first
    python -m benchmarks.cuda first-light-2 --out build/light    the parts that take longer

Uses random weights in the shapes of Llama 3.1 8B and Llama 3.2 1B; nothing is downloaded. With `--device cpu` all parts
run on tiny models. That is a dry run, whose speeds mean nothing. docs/benchmarks/cuda.md describes each part.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.cuda.catalogue import COMMANDS
from benchmarks.cuda.report import Folder
from benchmarks.cuda.running import run_all
from benchmarks.cuda.setting import Setting


def main() -> int:
    """Run the command; the status is 0 if all parts ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs=2, metavar=("TARGET", "DRAFT"), help="8b 1b; on a CPU tiny tiny")
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of parts, to run these alone")
    asked = parser.parse_args()
    shapes = asked.shapes or (["tiny", "tiny"] if asked.device == "cpu" else ["8b", "1b"])
    if asked.device == "cpu":  # Triton and OpenMP read these when they are first loaded
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # models are too small for a second thread
    parts = [part for part in COMMANDS[asked.command] if asked.only is None or part.name in asked.only]
    if not parts:
        parser.error(f"parts are {', '.join(part.name for part in COMMANDS[asked.command])}")
    folder = Folder(asked.out, asked.command)
    folder.begin()
    title = asked.command.replace("-", " ").capitalize()
    folder.write(f"# {title}: {' over '.join(shapes)} on {asked.device}", "", f"`{' '.join(sys.argv[1:])}`")
    return 0 if run_all(parts, Setting.of(asked.device, *shapes), folder) else 1


if __name__ == "__main__":
    sys.exit(main())
