"""What `make test-lowest` installs is the oldest that we say we run with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

requirements = pytest.importorskip("packaging.requirements", reason="packaging is not installed")

ROOT = Path(__file__).resolve().parents[2]


def read(lines: list[str]) -> dict[str, set[str]]:
    """Bounds by name: {"torch": {">=2.11", "<2.14"}}."""
    found = map(requirements.Requirement, lines)
    return {one.name: set(map(str, one.specifier)) for one in found}


def test_the_lowest_pins_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.partition("#")[0].strip() for line in (ROOT / "tests/lowest.txt").read_text().splitlines()]
    bounds = read([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    pins = read([line for line in lines if line])
    exact = {name: pin.removeprefix("==") for name, pins_ in pins.items() for pin in pins_ if pin.startswith("==")}
    assert exact.keys() == {"torch", "transformers", "triton"}
    for name, version in exact.items():
        assert f">={version.removesuffix('.0')}" in bounds[name], f"{name} has another lower bound"
    assert pins.keys() <= bounds.keys(), "tests need nothing else there than here"
