"""Checkpoints are read a matrix at a time: little memory, words of progress, and files that are cut short are named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.machine import mapped
from engine.machine.mapped import ReadProgress
from engine.model.quantize import load_quantised, save_quantised, skeleton
from engine.model.runner import load_model
from engine.startup.build import load, pick_device
from models import embedded_target

CPU = torch.device("cpu")
MB = 2**20

_MEASURE = """
import os
import sys
from pathlib import Path
from engine.startup.build import load, pick_device
from engine.config import EngineConfig

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
    """111 million weights in bfloat16, 212 MiB in four files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=4096,
        dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    drawn = torch.randn(2**16).mul_(0.02).bfloat16()
    shapes = {name: weight.shape for name, weight in skeleton(config, torch.bfloat16).state_dict().items()}
    names = sorted(shapes)
    for i in range(4):
        few = {name: drawn.repeat(-(-shapes[name].numel() // len(drawn)))[: shapes[name].numel()].view(shapes[name])
               for name in names[i::4]}  # fmt: skip
        save_file(few, folder / f"model-{i + 1:05}-of-00004.safetensors", metadata={"format": "pt"})
    index = {name: f"model-{i % 4 + 1:05}-of-00004.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
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


def cut_short(folder: Path, tmp_path: Path, size: int) -> Path:
    """A copy whose first file was broken off."""
    copy = shutil.copytree(folder, tmp_path / "cut")
    file = min(copy.glob("*.safetensors"))
    with file.open("rb+") as handle:
        handle.truncate(size)
    return file


@pytest.mark.parametrize("weights", ["native", "int8"])
def test_a_file_that_is_cut_short_is_named(weights: str, tmp_path: Path) -> None:
    whole = min(Path(embedded_target()).glob("*.safetensors")).stat().st_size
    file = cut_short(Path(embedded_target()), tmp_path, whole - 10)
    config = EngineConfig(target=str(file.parent))
    with pytest.raises(ModelError, match=rf"{file} is cut short: \S+ ends at byte {whole}, the file at {whole - 10}"):
        load(config, str(file.parent), None, weights, CPU)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_header_that_is_cut_short_is_told(size: int, tmp_path: Path) -> None:
    file = cut_short(Path(embedded_target()), tmp_path, size)
    with pytest.raises(ModelError, match=rf"{file} is (cut short: its header|no safetensors file)"):
        load_model(str(file.parent), None, torch.float32, CPU)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target in int8."""
    folder = tmp_path_factory.mktemp("saved") / "int8"
    save_quantised(embedded_target(), None, folder)
    return folder


def test_a_saved_file_that_is_cut_short_is_named(saved: Path, tmp_path: Path) -> None:
    file = cut_short(saved, tmp_path, (saved / "model.safetensors").stat().st_size // 2)
    with pytest.raises(ModelError, match=rf"{file} is cut short: \S+ ends at byte"):
        load_quantised(str(file.parent), None, torch.float32)


@pytest.mark.parametrize(
    ("kind", "shown"), [("weight_codes", r"codes \[3, 256\]"), ("weight_scale", r"scale: \[3, 8\] does not fit")]
)
def test_a_saved_matrix_of_another_shape_is_named(kind: str, shown: str, saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    key = f"model.layers.1.mlp.up_proj.{kind}"
    tensors[key] = tensors[key][:3].clone()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model.layers.1.mlp.up_proj.*{shown}|{shown}.*layers.1.mlp.up_proj"):
        load_quantised(str(copy), None, torch.float32)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_weight_that_is_no_number_is_named(weights: str, tmp_path: Path) -> None:
    copy = shutil.copytree(embedded_target(), tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][7, 9] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.down_proj.weight has a number that is not finite"):
        load_quantised(str(copy), None, torch.float32, weights)


@pytest.mark.parametrize(
    ("form", "weights"), [("float", "native"), ("float", "int8"), ("float", "int4"), ("saved", "native")]
)
def test_progress_is_told_in_bytes(form: str, weights: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_SECONDS", 0.0)
    monkeypatch.setattr(mapped, "_GB", 1)
    name, said = str(saved) if form == "saved" else str(embedded_target()), list[str]()
    load(EngineConfig(target=name), name, None, weights, pick_device("cpu"), progress=said.append)
    size = sum(path.stat().st_size for path in Path(name).glob("*.safetensors"))
    read = [float(line.removeprefix(f"loading {name}: ").removesuffix(f" of {size}.0 GB")) for line in said]
    assert len(read) > 10, "matrices, one at a time"
    assert read[-1] > 0.9 * size


def test_progress_is_told_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 100.0, list[str]()
    monkeypatch.setattr(mapped.time, "monotonic", lambda: now)
    reading = ReadProgress("loading x", lambda: 8 * 10**9, said.append)
    for _ in range(9):
        reading.add(10**9)
        now += 0.5
    assert said == ["loading x: 5.0 of 8.0 GB", "loading x: 8.0 of 8.0 GB"]
