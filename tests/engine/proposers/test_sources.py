"""What an entry of the option `draft` is follows from its files, and nothing that cannot draft is taken for a draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from pydantic import ValidationError

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.proposers import sources
from pilotfish.engine.proposers.sources import DraftSource, draft_sources, recognise
from pilotfish.models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests import adapters, gguf_files, heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints as dflash
from tests.engine.proposers.heads.test_eagle3 import speculators


def adapter(folder: Path) -> str:
    return str(adapters.write(folder, zoo.reference("llama"), 2, 2.0, ["q_proj"]))


def beside_its_base_model(folder: Path) -> str:
    zoo.reference("llama").save_pretrained(folder)
    adapter(folder / "adapter")
    return str(folder)


def of_eagle_1(folder: Path, **changes: Any) -> str:
    return heads.save(folder, speculators(**changes), heads.eagle_tensors())


FORMS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "embedded draft": ("model", lambda _: str(embedded_draft())),
    "embedded target": ("model", lambda _: str(embedded_target())),
    "embedded heads": ("medusa", lambda _: str(embedded_medusa())),
    "embedded head": ("eagle", lambda _: str(embedded_eagle())),
    "EAGLE-1 with a Llama's config": ("eagle", heads.eagle),
    "EAGLE-3 by its config": ("eagle", lambda folder: heads.eagle3(folder, {})),
    "EAGLE-3 with a Llama's config": (
        "eagle", lambda folder: heads.save(folder, heads.EAGLE_CONFIG, heads.eagle3_tensors(heads.EAGLE3_CONFIG)),
    ),
    "EAGLE-3 without a projection": (
        "eagle", lambda folder: heads.save(folder, heads.EAGLE_CONFIG, {"midlayer.hidden_norm.weight": torch.ones(2)}),
    ),
    "EAGLE-1 of speculators": ("eagle", lambda folder: of_eagle_1(folder, speculators_model_type="eagle")),
    "P-EAGLE of speculators": ("eagle", lambda folder: of_eagle_1(folder, speculators_model_type="peagle")),
    "DFlash of its authors": ("dflash", dflash.authors),
    "DFlash of speculators": (
        "dflash", lambda folder: heads.save(folder, dflash.SPECULATORS, dflash.tensors(speculators=True)),
    ),
    "adapter": ("uno", adapter),
    "adapter beside its base model": ("uno", beside_its_base_model),
    "GGUF": (
        "model", lambda folder: str(gguf_files.write(folder / "m.gguf", zoo.family_config("llama"), Type.F16).path),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_published_form_is_recognised(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, make = FORMS[form]
    name = make(tmp_path)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: 1 / 0)  # no weights are read
    assert recognise(name) == DraftSource(kind, name, name)


def test_words_are_parts_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recognise("mtp") == DraftSource("mtp", "mtp", "mtp")
    assert [recognise(word).layers for word in ("self", "self:1", "self:12")] == [None, 1, 12]
    monkeypatch.chdir(tmp_path)
    heads.medusa(tmp_path)
    (tmp_path / "medusa").rename("mtp")
    assert recognise("./mtp").kind == "medusa"


def test_a_revision_is_of_the_hub_and_a_folder_may_have_its_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, str | None]]()
    file = tmp_path / "config.json"
    file.write_text('{"medusa_num_heads": 3}')

    def found(name: str, wanted: str, revision: str | None) -> Path | None:
        asked.append((name, revision))
        return file if wanted == "config.json" else None

    monkeypatch.setattr(sources, "find_file", found)
    for entry, name, revision in (("o/m@1a2b", "o/m", "1a2b"), ("o/m", "o/m", None), ("o/m@v@2", "o/m@v", "2")):
        assert recognise(entry) == DraftSource("medusa", entry, name, revision)
        assert {*asked[-3:]} == {(name, revision)}
    folder = tmp_path / "model@2"
    folder.mkdir()
    assert recognise(str(folder)) == DraftSource("medusa", str(folder), str(folder))


def config(table: Any) -> dict[str, str]:
    return {"config.json": table if isinstance(table, str) else json.dumps(table)}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {},
            "is not a GGUF file and has neither config.json nor adapter_config.json in the folder, which has no files",
        ),
        ({"a.txt": "", "b.bin": ""}, "in the folder, which has a.txt, b.bin"),
        (config({"name": 1, "size": 2}), "config.json has the keys name, size, neither a model nor a known head"),
        (
            config({"speculators_model_type": "mlp", "model_type": "x"}),
            "speculators_model_type 'mlp', neither a model nor a known head",
        ),
        (config([1]), "config.json is not an object"),
        (config("{"), "cannot load model"),
        (config({"model_type": "llama", "architectures": 3}), "cannot load model"),
        (config({"model_type": "llama"}) | {"model.safetensors": "cut"}, "model.safetensors"),
        (config(" " * (5 << 20)), r"config.json has \d+ bytes; expected at most"),
    ],
)
def test_what_cannot_draft_is_named_with_what_was_found(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=problem) as told:
        recognise(str(tmp_path))
    assert str(tmp_path) in str(told.value)


@pytest.mark.parametrize("entry", ["/nowhere", "./nowhere", "self:x", "a b", ""])
def test_nothing_is_no_draft(entry: str) -> None:
    with pytest.raises(ModelError):
        recognise(entry)


def test_without_files_on_the_hub_the_network_may_be_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_file", lambda *_: None)
    with pytest.raises(
        ModelError, match=r"draft 'o/m@1' is not a GGUF file .* on the hub, or the hub cannot be reached"
    ):
        recognise("o/m@1")


def test_several_kinds_are_sorted_and_two_of_a_kind_are_refused(tmp_path: Path) -> None:
    medusa, model, eagle = str(embedded_medusa()), str(embedded_draft()), heads.eagle(tmp_path)
    found = draft_sources(EngineConfig(target="t", draft=["mtp", eagle, medusa, "self", model]))
    assert list(found) == ["model", "self", "medusa", "eagle", "mtp"]
    for one, other, kind in (
        (eagle, str(embedded_eagle()), "EAGLE heads"),
        ("self:1", "self", "first layers of the target"),
        (model, model, "draft models"),
    ):
        with pytest.raises(ModelError, match=f"draft: '{one}' and '{other}' are both {kind}; expected at most one"):
            draft_sources(EngineConfig(target="t", draft=[one, medusa, other]))


def test_what_needs_a_whole_target_is_refused_for_shards(tmp_path: Path) -> None:
    for entry, reason in (("self:2", "draws from whole layers"), (adapter(tmp_path), "adapters cannot be sharded")):
        with pytest.raises(ModelError, match=f"tensor_parallel_size is 2; draft '{entry}' .*{reason}"):
            draft_sources(EngineConfig(target="t", draft=entry, tensor_parallel_size=2))
    sharded = EngineConfig(target="t", draft=str(embedded_draft()), tensor_parallel_size=2)
    assert list(draft_sources(sharded)) == ["model"]


def test_the_option_is_one_name_or_several(tmp_path: Path) -> None:
    for given, entries in (
        ("a", ("a",)),
        (None, ()),
        (tmp_path, (str(tmp_path),)),
        (["a", tmp_path], ("a", str(tmp_path))),
    ):
        assert EngineConfig(target="t", draft=given).draft == entries
    for wrong in (3, [3], {"a": "b"}):
        with pytest.raises(ValidationError, match="draft"):
            EngineConfig(target="t", draft=wrong)
    with pytest.raises(ValidationError, match="eagle"):
        EngineConfig(target="t", eagle="a")
