"""A GGUF file through a real gRPC server: its own tokenizer, and a draft from another file."""

from __future__ import annotations

import asyncio

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.startup.check import check
from pilotfish.models import embedded_target
from pilotfish.server.model import fingerprint, model_name
from tests import gguf_files
from tests.server.worker.in_process import load_models
from tests.serving import grpc_client, serving

PROMPTS = ("def f(x):", "import os\n\nclass A:\n    ", "x")
Pair = tuple[gguf_files.Written, gguf_files.Written]
VOCABULARY = 2048  # of the embedded tokenizer


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_string("tokenizer.huggingface.json", (embedded_target() / "tokenizer.json").read_text("utf-8"))
    writer.add_chat_template((embedded_target() / "chat_template.jinja").read_text("utf-8"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and a draft of its first layer's kind in four bits."""
    folder, config = tmp_path_factory.mktemp("gguf"), gguf_files.llama(vocab_size=VOCABULARY)
    target = gguf_files.write(folder / "target.gguf", config, Type.Q8_0, _tokenizer)
    return target, gguf_files.write(folder / "draft.gguf", config, Type.Q4_0, _tokenizer)


async def test_on_our_kernels_a_draft_changes_nothing(pair: Pair) -> None:
    files = {name: str(written.path) for name, written in zip(("target", "draft"), pair, strict=True)}
    async with (
        serving(load=load_models, threads=1, warm_up_seconds=0.0, **files) as server,
        grpc_client(server) as client,
    ):
        drafted, plain = [
            await asyncio.gather(*(client.generate(prompt, max_tokens=16, speculation=mode) for prompt in PROMPTS))
            for mode in ("fixed", "off")
        ]
    assert [(done.token_ids, done.text) for done in drafted] == [(done.token_ids, done.text) for done in plain]
    assert all(done.text for done in plain)


def test_it_is_checked_and_named(pair: Pair) -> None:
    target, draft = pair
    config = EngineConfig(target=str(target.path), draft=str(draft.path), device="cpu", threads=1)
    report = check(config, load=False).as_dict()
    assert report["problems"] == []
    assert report["target"]["tokenizer"] == report["target"]["chat template"] == "present"
    assert report["target"]["family"] == "llama"
    assert report["target"]["runs in"] == "decoder (llama)"
    assert report["pair"]["vocabulary"] == "the same"
    assert model_name(str(target.path)) == "target.gguf"
    names = {fingerprint(EngineConfig(target=str(written.path)), "float32") for written in pair}
    assert len(names) == 2
