"""Runs a tiny model of every causal language model class as a server would; `make classes` writes how it went.

The block that is written into docs/models.md has the model types in groups, the well-known ones first, and the reason
of each refusal. It holds for one version of transformers, which it names.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.architecture import architecture_of
from pilotfish.engine.model.runner import ModelRunner
from pilotfish.engine.model.text_part import text_part
from pilotfish.engine.model.unbatched import UnbatchedRunner
from pilotfish.engine.startup.build import build_engine
from tests import fakes, zoo
from tests.classes import KINDS, tiny
from tests.families import generate

NEW_TOKENS = 8
DECODER, RAGGED = "decoder", "ragged, in transformers' module"
ALONE, WHOLE = "one sequence at a time", "one sequence at a time, fed its whole text in every pass"
REFUSED = "refused: "
WAYS = (DECODER, RAGGED, ALONE, WHOLE)
BEGIN, END = "<!-- written by `make classes` -->\n", "<!-- end of what `make classes` writes -->\n"
_WITHOUT_CACHE = {"blt"}  # classes whose own `generate` fails with a cache
# What is asked for most, in our judgement; all others follow by name.
_KNOWN = """
llama qwen3 qwen2 mistral gemma3 gemma3_text gpt_oss deepseek_v3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next phi3 gemma2
gemma mixtral gpt2 llama4 glm4_moe gemma4 smollm3 granite olmo2 lfm2 opt gpt_neox bloom falcon mamba nemotron_h
falcon_h1 jamba granitemoehybrid cohere2 starcoder2 phi stablelm gptj gpt_neo mpt minimax_m2 deepseek_v2 ministral3
exaone4 ernie4_5 seed_oss hunyuan_v1_dense bert roberta
"""
_PLACE = {kind: place for place, kind in enumerate(_KNOWN.split())}


def outcome(kind: str) -> str:
    """One of `WAYS`, or `REFUSED` and the reason.

    Raises:
        AssertionError: it runs, and its tokens are not those of `generate`.
    """
    with tempfile.TemporaryDirectory() as folder:
        _save(kind, folder)
        return _run(kind, folder)


def _save(kind: str, folder: str) -> None:
    """Write a tiny checkpoint; of a class that transformers cannot build its config, and weights of nothing.

    Of a class whose other parts need libraries that are not here it is the language model inside.
    """
    config = tiny(kind)
    try:
        try:
            model = zoo.with_large_weights(config)
        except ImportError:
            config = text_part(config)
            model = zoo.with_large_weights(config)
    except (ImportError, AttributeError):
        config.save_pretrained(folder)
        save_file({"none": torch.zeros(1)}, Path(folder, "model.safetensors"))
        return
    model.save_pretrained(folder)
    if type(model.config) is not type(config):  # the class has only the part for text
        config.save_pretrained(folder)


def _run(kind: str, folder: str) -> str:
    sizes = {"threads": 1, "max_batch_size": 4, "kv_memory": 0.1, "max_model_len": 96, "max_batch_tokens": 13}
    try:
        engine = build_engine(EngineConfig(target=folder, proposer="ngram", **sizes))
    except ModelError as error:
        return REFUSED + _in_short(str(error), folder)
    prompts = zoo.prompts(3)
    outputs = fakes.run(engine, fakes.requests(prompts, max_tokens=NEW_TOKENS))
    model = AutoModelForCausalLM.from_pretrained(folder)
    # Without forced tokens, which no server has.
    model.generation_config = GenerationConfig(eos_token_id=zoo.END, use_cache=kind not in _WITHOUT_CACHE)
    expected = [generate(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert [outputs.tokens[str(i)] for i in range(len(prompts))] == expected, f"{kind}: not what generate gives"
    return way_of(engine)


def way_of(engine: Engine) -> str:
    """How the engine runs its target, and in whose code."""
    target = engine.runner
    if isinstance(target, UnbatchedRunner):
        return WHOLE if target._keeps_tokens else ALONE
    assert isinstance(target, ModelRunner)
    return RAGGED if architecture_of(target.model) is None else DECODER


def _in_short(reason: str, folder: str) -> str:
    """The last reason of a message, without the names of the class and of the folder; as a cell of a table."""
    last = reason.replace(repr(folder), "the checkpoint").rpartition("one sequence at a time: ")[2]
    last = re.sub(r"^(cannot load model the checkpoint: |\w+(?:For\w+|LMHead\w*):? )", "", " ".join(last.split()))
    last = re.sub(r"^\w+Error\(['\"](.*)['\"]\)$", r"\1", last)
    return last.partition(". ")[0].rstrip(".").replace("|", "/")


def block(outcomes: Mapping[str, str]) -> str:
    """What stands between the markers, from the outcome of each model type."""
    classes = {KINDS[kind] for kind, found in outcomes.items() if found in WAYS}
    count = f"{len(classes)} of {len(set(KINDS.values()))} classes run"
    lines = [f"With transformers {transformers.__version__}, {count}; by their model types, well-known ones first:", ""]
    for way in WAYS:
        kinds = [kind for kind in by_popularity(outcomes) if outcomes[kind] == way]
        line = f"- **{way}** ({len(kinds)}): {', '.join(kinds)}"
        lines += textwrap.wrap(line, 130, subsequent_indent="  ", break_on_hyphens=False)
    lines += ["", "| model type | why it is refused |", "|---|---|"]
    others = [kind for kind in by_popularity(outcomes) if outcomes[kind] not in WAYS]
    return "\n".join([*lines, *(f"| {kind} | {outcomes[kind].removeprefix(REFUSED)} |" for kind in others), ""])


def read(page: str) -> dict[str, str]:
    """The outcome of each model type on the page; the inverse of `block`."""
    found = dict[str, str]()
    text = page.partition(BEGIN)[2].partition(END)[0]
    for way, kinds in re.findall(r"^- \*\*(.+?)\*\* \(\d+\): ((?:.+\n)(?:  .+\n)*)", text, re.MULTILINE):
        found |= dict.fromkeys(re.split(r",\s+", kinds.strip()), way)
    for kind, reason in re.findall(r"^\| ([\w-]+) \| (.+) \|$", text, re.MULTILINE):
        found[kind] = REFUSED + reason
    return found


def by_popularity(kinds: Iterable[str]) -> list[str]:
    """Model types, the well-known first, the others by name."""
    return sorted(kinds, key=lambda kind: (_PLACE.get(kind, len(_PLACE)), kind))


def main(page: Path) -> None:
    """Run all classes and write the page's block anew."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    outcomes = {kind: outcome(kind) for kind in KINDS}
    page.write_text(before + BEGIN + block(outcomes) + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
