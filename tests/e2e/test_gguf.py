"""A GGUF file through a real gRPC server: its own tokenizer, and a draft from another file."""

from __future__ import annotations

import asyncio

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from client import AsyncClient
from engine.config import EngineConfig
from engine.startup.doctor import check
from engine.text.codec import Codec
from models import embedded_target
from server.fingerprint import fingerprint
from server.model import ServedModel, model_name
from tests import gguf_files
from tests.families import generate
from tests.serving import serving

NEW_TOKENS = 16
PROMPTS = ("def f(x):", "import os\n\nclass A:\n    ", "x")
VOCABULARY = 2048  # of the embedded tokenizer


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_string("tokenizer.huggingface.json", (embedded_target() / "tokenizer.json").read_text("utf-8"))
    writer.add_chat_template((embedded_target() / "chat_template.jinja").read_text("utf-8"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[gguf_files.Written, gguf_files.Written]:
    """A target, and a draft of its first layer's kind in four bits."""
    folder, config = tmp_path_factory.mktemp("gguf"), gguf_files.llama(vocab_size=VOCABULARY)
    target = gguf_files.write(folder / "target.gguf", config, Type.Q8_0, _tokenizer)
    return target, gguf_files.write(folder / "draft.gguf", config, Type.Q4_0, _tokenizer)


async def _texts(settings: dict[str, object]) -> list[tuple[list[int], str]]:
    async with (
        serving(load=ServedModel.load, **{"threads": 1, "warm_up_seconds": 0.0} | settings) as server,
        AsyncClient(f"127.0.0.1:{server.app.grpc_port}") as client,
    ):
        return await asyncio.gather(*(_text(client, prompt) for prompt in PROMPTS))


async def _text(client: AsyncClient, prompt: str) -> tuple[list[int], str]:
    tokens, text = list[int](), ""
    async for event in client.stream(prompt, max_tokens=NEW_TOKENS):
        tokens += getattr(event, "token_ids", ())
        text += getattr(event, "text", "")
    return tokens, text


async def test_dequantised_it_is_the_model_that_generate_runs(
    pair: tuple[gguf_files.Written, gguf_files.Written],
) -> None:
    target, draft = pair
    codec = Codec.load(embedded_target())
    assert codec is not None
    served = await _texts(
        {"target": str(target.path), "draft": str(draft.path), "weights": "dequantised", "dtype": "float32"}
    )
    expected = [generate(target.model, list(codec.encode(prompt)), NEW_TOKENS) for prompt in PROMPTS]
    assert [tokens for tokens, _ in served] == expected


async def test_on_our_kernels_a_draft_changes_nothing(pair: tuple[gguf_files.Written, gguf_files.Written]) -> None:
    target, draft = pair
    plain = await _texts({"target": str(target.path), "speculation": "off"})
    assert await _texts({"target": str(target.path), "draft": str(draft.path)}) == plain
    assert all(text for _, text in plain)


def test_it_is_checked_and_named(pair: tuple[gguf_files.Written, gguf_files.Written]) -> None:
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
