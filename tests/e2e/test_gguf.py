"""A GGUF file through a real gRPC server: its own tokenizer, and a draft from another file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from engine.config import EngineConfig
from engine.startup.doctor import check
from engine.text.codec import Codec
from models import embedded_target
from server.fingerprint import fingerprint
from server.model import ServedModel, model_name
from tests import gguf_files
from tests.families import generate
from tests.serving import grpc_client, serving

NEW_TOKENS = 16
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


async def _outputs(asked: Iterable[str], **settings: str) -> list[list[tuple[tuple[int, ...], str]]]:
    """What a server of these files gives for each prompt, in each of the modes."""
    async with (
        serving(load=ServedModel.load, threads=1, warm_up_seconds=0.0, **settings) as server,
        grpc_client(server) as client,
    ):
        calls = [
            asyncio.gather(*(client.generate(prompt, max_tokens=NEW_TOKENS, speculation=mode) for prompt in PROMPTS))
            for mode in asked
        ]
        return [[(done.token_ids, done.text) for done in await call] for call in calls]


async def test_dequantised_it_is_the_model_that_generate_runs(pair: Pair) -> None:
    target, draft = pair
    codec = Codec.load(embedded_target())
    assert codec is not None
    files = {"target": str(target.path), "draft": str(draft.path)}
    [served] = await _outputs(["fixed"], **files, weights="dequantised", dtype="float32")
    expected = [generate(target.model, list(codec.encode(prompt)), NEW_TOKENS) for prompt in PROMPTS]
    assert [list(tokens) for tokens, _ in served] == expected


async def test_on_our_kernels_a_draft_changes_nothing(pair: Pair) -> None:
    target, draft = pair
    drafted, plain = await _outputs(["fixed", "off"], target=str(target.path), draft=str(draft.path))
    assert drafted == plain
    assert all(text for _, text in plain)


def test_it_is_checked_and_named(pair: Pair) -> None:
    target, draft = pair
    config = EngineConfig(target=str(target.path), draft=str(draft.path), device="cpu", threads=1)
    report = check(config, load=False).as_dict()
    assert report["problems"] == []
    assert report["target"]["tokenizer"] == report["target"]["chat template"] == "present"
    assert report["target"]["family"] == "llama (LlamaForCausalLM)"
    assert report["pair"]["vocabulary"] == "the same"
    assert model_name(str(target.path)) == "target.gguf"
    names = {fingerprint(EngineConfig(target=str(written.path)), "float32") for written in pair}
    assert len(names) == 2
