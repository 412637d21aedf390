"""`pilotfish check`: its report on valid pairs; errors are reported as problems, never as a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.model.linear.grouped import kernel_name
from pilotfish.engine.model.quantize import save_quantised
from pilotfish.engine.native import instructions, multiplies
from pilotfish.engine.native.compiled import Loaded
from pilotfish.engine.startup.check import CheckReport, check
from pilotfish.models import embedded_draft, embedded_target
from tests import zoo
from tests.respell import shuffled


def doctor(target: object, draft: object = None, *, load: bool = False, **config: object) -> CheckReport:
    settings = {"target": str(target), "draft": None if draft is None else str(draft), "threads": 1}
    return check(EngineConfig(**settings | config), load=load)


def line(report: CheckReport, section: str, name: str) -> str:
    return report.as_dict()[section][name]


@pytest.fixture
def phi3(tmp_path: Path) -> Path:
    zoo.reference("phi3-longrope").save_pretrained(tmp_path / "phi3")
    return tmp_path / "phi3"


def test_the_embedded_pair_works() -> None:
    report = doctor(embedded_target(), embedded_draft(), load=True, dtype="float32")
    assert report.works
    assert line(report, "target", "family") == "llama"
    assert {line(report, model, "runs in") for model in ("target", "draft")} == {"decoder (llama)"}
    assert line(report, "target", "K/V") == "10240 bytes per token"
    assert line(report, "target", "end tokens") == "0 <|endoftext|>"
    assert line(report, "pair", "vocabulary") == "the same"
    assert line(report, "pair", "proposer") == "auto, up to 8 drafts (auto)"
    assert line(report, "load", "self-test").startswith("passed")
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


def test_a_target_in_shares() -> None:
    whole, shared = (doctor(embedded_target(), embedded_draft(), tensor_parallel_size=n) for n in (1, 2))
    assert line(shared, "pair", "shares") == "2 of the target, one per process of torchrun, K/V heads 1 each"
    assert shared.works
    assert line(shared, "pair", "K/V pages") != line(whole, "pair", "K/V pages")
    [problem] = doctor(embedded_target(), tensor_parallel_size=4).problems
    assert "does not divide num_key_value_heads" in problem
    [problem] = doctor(embedded_target(), tensor_parallel_size=2, load=True).problems
    assert "tensor_parallel_size is 2, but WORLD_SIZE (number of processes) is 1" in problem


def test_it_reports_each_models_type_and_the_reason(tmp_path: Path) -> None:
    shutil.copytree(embedded_draft(), tmp_path, dirs_exist_ok=True)  # nothing here reads its weights
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    report = doctor(embedded_target(), tmp_path)
    can = multiplies(torch.bfloat16)
    own = "bfloat16: the checkpoint's own" if can else "float32: the C kernels do not support bfloat16 here"
    assert line(report, "target", "type").startswith(own)
    assert line(report, "target", "K/V") == f"{5120 if can else 10240} bytes per token"
    assert line(report, "draft", "type") == "float32: the checkpoint's own"
    assert line(report, "draft", "weights").endswith("MiB in float32")
    asked = doctor(embedded_target(), tmp_path, dtype="bfloat16")
    assert {line(asked, model, "type") for model in ("target", "draft")} == {"bfloat16: configured"}
    [problem] = doctor(embedded_target(), dtype="float16").problems
    assert "which requires cuda" in problem


def test_eight_billion_weights_take_sixteen_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card would hold them, and not 32, unless float32 is asked for."""
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(b"nobody reads it")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (80 << 30, 80 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 0)
    own, wide = doctor(tmp_path), doctor(tmp_path, dtype="float32")
    assert own.works
    assert line(own, "target", "weights") == "14.96 GiB in bfloat16"
    assert line(own, "target", "K/V") == "131072 bytes per token"
    assert line(doctor(tmp_path, kv_cache_dtype="int8"), "target", "K/V") == "67584 bytes per token in int8"
    assert line(wide, "target", "weights") == "29.92 GiB in float32"
    left = [float(line(report, "pair", "K/V pages").split("kv_memory is ")[1].split()[0]) for report in (own, wide)]
    assert left[0] > left[1] + 14, "what the weights do not take is for K/V"
    [problem] = doctor(tmp_path, dtype="float32", kv_memory=20, engines_per_device=2).problems
    assert "kv_memory is 20 GiB with 2 engines per device (standby" in problem


def test_without_a_draft_the_prompt_drafts_and_weights_are_not_read_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded_target(), folder)
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    report = doctor(folder)
    assert report.works
    assert line(report, "pair", "proposer").startswith("ngram")
    assert not {"draft", "load"} & set(report.as_dict())
    [problem] = doctor(folder, load=True).problems
    assert "model.safetensors is truncated" in problem


def test_it_reports_the_reason_of_the_context_limit(phi3: Path, tmp_path: Path) -> None:
    assert "a second table beyond 32 tokens" in line(doctor(phi3), "target", "context")
    model = zoo.with_large_weights(zoo.family_config("llama"))
    model.config.rope_parameters = {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model.save_pretrained(tmp_path / "dynamic")
    assert line(doctor(tmp_path / "dynamic"), "target", "context").startswith("64 tokens (dynamic RoPE of llama")


def test_a_draft_of_another_vocabulary(phi3: Path, tmp_path: Path) -> None:
    shuffled(embedded_draft(), tmp_path / "mapped", without=300)
    report = doctor(embedded_target(), tmp_path / "mapped", load=True)
    assert report.works
    assert line(report, "pair", "vocabulary") == "mapped: 1748 of the target's 2047 tokens shared"
    [problem] = doctor(embedded_target(), phi3).problems
    assert "requires a tokenizer.json" in problem
    assert line(doctor(phi3, phi3), "pair", "vocabulary").startswith("of one size, assumed to be the same")


def test_different_end_tokens_are_reported(phi3: Path) -> None:
    (phi3 / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    other = phi3.parent / "other"
    zoo.reference("phi3-longrope").save_pretrained(other)
    assert "target 2, 7; draft 2" in line(doctor(phi3, other), "pair", "end tokens")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_model_len": 5000}, "max_model_len is 5000"),
        ({"kv_memory": 1e-9}, "kv_memory"),
        ({"proposer": "medusa"}, "proposer is 'medusa'; available: none, ngram, suffix"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_settings_that_cannot_work(config: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    report = doctor(embedded_target(), **config)
    assert [reason in problem for problem in report.problems] == [True]


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere"])
def test_no_such_folder(name: str) -> None:
    assert doctor(name).problems == [f"cannot load model {name!r}: no such folder"]
    assert len(doctor(name, name + "2").problems) == 2


@pytest.mark.slow
def test_it_reports_int8(tmp_path: Path) -> None:
    save_quantised(str(embedded_target()), None, tmp_path / "int8")
    for target, config in ((embedded_target(), {"weights": "int8"}), (tmp_path / "int8", {})):
        report = doctor(target, embedded_draft(), load=True, draft_weights="native", dtype="float32", **config)
        assert report.works
        assert f"in int8 ({kernel_name()} kernel), the rest in float32" in line(report, "target", "weights")
        assert line(report, "target", "weights").startswith("8.1 MiB")
        assert line(report, "draft", "weights").endswith("MiB in float32")


def test_it_reports_each_implementation_and_imports_transformers_only_for_its_modules(tmp_path: Path) -> None:
    zoo.reference("falcon").save_pretrained(tmp_path)
    program = """if True:
        import json, sys
        from pilotfish.server.commands.check import run
        target, other, *options = sys.argv[1:]
        for draft in (target, other):
            text, works = run([target, "--draft", draft, "--json", *options], lambda _: None)
            report = json.loads(text)
            print(works, *(report[model]["runs in"] for model in ("target", "draft")), "transformers" in sys.modules)
    """
    options = ["--device", "cpu", "--kv-memory", "0.01"]
    told = subprocess.run(
        [sys.executable, "-c", program, str(embedded_draft()), str(tmp_path), *options], capture_output=True, text=True
    )  # fmt: skip
    assert told.stdout.splitlines() == [
        "True decoder (llama) decoder (llama) False",
        "False decoder (llama) transformers' module: this falcon model is not in the table of architectures True",
    ], told.stderr


def test_it_reports_the_instructions_of_our_c(monkeypatch: pytest.MonkeyPatch) -> None:
    told = line(doctor(embedded_target()), "environment", "kernels")
    assert told == instructions()
    monkeypatch.setattr("pilotfish.engine.native.compiled.loaded", lambda: Loaded(None, problem="no libraries"))
    told = line(doctor(embedded_target()), "environment", "kernels")
    assert told.startswith("torch (several times slower): C kernels not loaded (no libraries); fix: reinstall")
