"""Checkpoints are read a matrix at a time: little memory, words of progress, and files that are cut short are named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine import mapped
from pilotfish.engine.machine.mapped import ReadProgress
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.quantize import save_quantised
from pilotfish.engine.startup.build import load, pick_device
from pilotfish.models import embedded_target
from tests import zoo

CPU = torch.device("cpu")

_MEASURE = """
import os
import sys
from pathlib import Path
from pilotfish.engine.startup.build import load, pick_device
from pilotfish.engine.config import EngineConfig

def status(field):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(field))

def measure(small, checkpoint, weights):
    config = EngineConfig(target=checkpoint, weights=weights, device="cpu", threads=1)
    load(config, small, None, "int8", pick_device("cpu"))  # what only the first load takes: compiled code, threads
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model = load(config, checkpoint, None, weights, pick_device("cpu"))
    print(status("VmHWM") - before, status("VmRSS") - before, flush=True)

small, *asked = sys.argv[1:]
for checkpoint, weights in zip(asked[::2], asked[1::2]):
    if not (child := os.fork()):
        measure(small, checkpoint, weights)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """56 million weights in bfloat16, 107 MiB in four files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, vocab_size=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="30MB")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is told by Linux")
def test_a_load_takes_the_result_and_little_more(checkpoint: Path, tmp_path: Path) -> None:
    save_quantised(str(checkpoint), None, tmp_path / "out", "int8")
    asked = [(checkpoint, "int8"), (checkpoint, "int4"), (tmp_path / "out", "int8")]
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(embedded_target()), *(str(each) for pair in asked for each in pair)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for (folder, weights), line in zip(asked, ran.stdout.splitlines(), strict=True):
        peak, result = map(int, line.split())
        whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        assert peak <= result + whole // 4, f"more than a file beside it: {folder.name} as {weights}"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}  # matrices of whole pages
    zoo.with_large_weights(LlamaConfig(**zoo.COMMON | wide)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in int8."""
    folder = tmp_path_factory.mktemp("saved") / "int8"
    save_quantised(str(floats), None, folder)
    return folder


def cut_short(folder: Path, tmp_path: Path, size: int) -> Path:
    """A copy whose first file was broken off."""
    copy = shutil.copytree(folder, tmp_path / "cut")
    file = min(copy.glob("*.safetensors"))
    with file.open("rb+") as handle:
        handle.truncate(size)
    return file


@pytest.mark.parametrize(("form", "weights"), [("floats", "native"), ("floats", "int8"), ("saved", "native")])
def test_a_file_that_is_cut_short_is_named(
    form: str, weights: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(form)
    whole = (folder / "model.safetensors").stat().st_size
    file = cut_short(folder, tmp_path, whole - 10)
    config = EngineConfig(target=str(file.parent))
    with pytest.raises(ModelError, match=rf"{file} is truncated: \S+ ends at byte {whole}, the file at {whole - 10}"):
        load(config, str(file.parent), None, weights, CPU)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_truncated_header_is_reported(size: int, floats: Path, tmp_path: Path) -> None:
    file = cut_short(floats, tmp_path, size)
    with pytest.raises(ModelError, match=rf"{file} is (truncated: its header|not a valid safetensors file)"):
        load_model(str(file.parent), None, torch.float32, CPU)


UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def no_number(weight: Tensor) -> Tensor:
    weight[7, 9] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("form", "key", "change", "weights", "told"),
    [
        ("saved", f"{UP}.weight_codes", lambda old: old[:3].clone(), "int8", rf"{UP}.*codes \[3, 256\]"),
        (
            "saved",
            f"{UP}.weight_scale",
            lambda old: old[:3].clone(),
            "int8",
            rf"{UP}.*scale: \[3, 8\] does not fit|scale: \[3, 8\] .*{UP}",
        ),
        ("saved", "model.norm.weight", None, "int8", r"is missing 1 weights"),
        ("floats", f"{DOWN}.weight", no_number, "int8", rf"{DOWN}.weight has NaN or infinite values"),
        ("floats", f"{DOWN}.weight", no_number, "int4", rf"{DOWN}.weight has NaN or infinite values"),
    ],
)
def test_a_weight_that_is_wrong_is_named(
    form: str, key: str, change: Callable[[Tensor], Tensor] | None, weights: Any, told: str,
    request: pytest.FixtureRequest, tmp_path: Path,
) -> None:  # fmt: skip
    copy = shutil.copytree(request.getfixturevalue(form), tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    old = tensors.pop(key)
    if change is not None:
        tensors[key] = change(old)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=told):
        load(EngineConfig(target=str(copy)), str(copy), None, weights, CPU)


@pytest.mark.parametrize(
    ("form", "weights"), [("floats", "native"), ("floats", "int8"), ("floats", "int4"), ("saved", "native")]
)
def test_progress_is_reported_in_bytes(
    form: str, weights: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_SECONDS", 0.0)
    monkeypatch.setattr(mapped, "_MB", 1)
    name, said = str(request.getfixturevalue(form)), list[str]()
    load(EngineConfig(target=name), name, None, weights, pick_device("cpu"), progress=said.append)
    size = sum(path.stat().st_size for path in Path(name).glob("*.safetensors"))
    read = [float(line.removeprefix(f"loading {name}: ").partition(f" of {size} MB, ")[0]) for line in said]
    assert len(read) > 10, "matrices, one at a time"
    assert read[-1] > 0.9 * size


def test_progress_is_reported_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 100.0, list[str]()
    monkeypatch.setattr(mapped.time, "monotonic", lambda: now)
    reading = ReadProgress("loading x", lambda: 98_000_000, said.append)
    for _ in range(9):
        reading.add(12_200_000)
        now += 0.5
    assert said == ["loading x: 61 of 98 MB, 2.0 s", "loading x: 98 of 98 MB, 4.0 s"]
