"""Predicted outputs: edits of real files, whose tokens are those without a prediction, in a fraction of the passes."""

from __future__ import annotations

import random
import re
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from pilotfish.engine.request.prediction import TextAlignment
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.types import ReceivedOutput, Request, Resume
from tests.fakes import Outputs, fake_engine, hashed_law, run

ROOT = Path(__file__).resolve().parents[2]
CODEC = Codec.load(ROOT / "models" / "target")
VOCAB = 2048
FILES = ("server/queue.py", "engine/kv/pages.py", "client/results.py", "server/turns.py", "engine/stats.py")
PROMPT = (5, 6, 7)
MARGIN = 30.0  # logits by which the planned token is ahead: sampling draws it, too


def renamed(source, rng):
    words = re.findall(r"\b[a-z_]{5,}\b", source)
    often = sorted({word for word in words if 3 <= words.count(word) <= 12})
    return re.sub(rf"\b{rng.choice(often)}\b", "another_name", source)


def inserted(source, rng):
    lines = source.splitlines(keepends=True)
    at = rng.randrange(10, len(lines))
    return "".join([*lines[:at], "    # What follows was not here before.\n", "    value = compute(1)\n", *lines[at:]])


def deleted(source, rng):
    lines = source.splitlines(keepends=True)
    at = rng.randrange(10, len(lines) - 5)
    return "".join([*lines[:at], *lines[at + 4 :]])


def redocumented(source, rng):
    return re.sub(r'"""[^"]{5,}"""', '"""This text says something else."""', source, count=3)


EDITS = {edit.__name__: edit for edit in (renamed, inserted, deleted, redocumented)}


@lru_cache
def edited(file, edit):
    """Tokens of the first 450 or so of a file, and of its edit."""
    source = (ROOT / file).read_text("utf-8")[:1500]
    changed = edit(source, random.Random(f"{file} {edit.__name__}"))
    assert changed != source
    return CODEC.encode(source, bare=True), CODEC.encode(changed, bare=True)


def writes(output):
    """The law of a model that writes `output`; after other tokens than those, anything."""
    anything = hashed_law(VOCAB)

    def law(context):
        done = len(context) - len(PROMPT)
        if context[-8:] != (*PROMPT, *output[:done])[-8:] or done >= len(output):
            return anything(context)
        logits = torch.zeros(VOCAB)
        logits[output[done]] = MARGIN
        return logits

    return law


def asked(output, prediction=(), *, name="r", emitted=(), sampling=None, **speculation):
    return Request(
        request_id=name,
        token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=len(output), **{"temperature": 0.0, "seed": 3} | (sampling or {})),
        speculation=SpeculationParams(**speculation),
        prediction=tuple(prediction),
        resume=Resume(outputs=emitted) if emitted else None,
    )


def engine_that_writes(output, **options):
    sizes = {"num_pages": 300, "page_size": 16, "max_model_len": 2000, "max_batch_tokens": 512}
    return fake_engine(writes(output), vocab_size=VOCAB, **sizes | options)


def passes(engine):
    return sum(any(feed.num_logits for feed in batch) for batch in engine.runner.batches)


@pytest.mark.parametrize(("file", "edit"), list(zip(FILES, EDITS, strict=False)))
def test_an_edit_of_a_file_has_the_same_tokens_in_a_quarter_of_the_passes(file, edit):
    source, output = edited(file, EDITS[edit])
    engine = engine_that_writes(output)
    outputs = run(engine, [asked(output, source)])
    assert outputs.tokens["r"] == list(output)
    assert passes(engine) <= len(output) / 4
    usage = outputs.finished["r"].accepted_prediction_tokens
    blocks = SequenceMatcher(None, source, output, autojunk=False).get_matching_blocks()
    assert 0.9 * sum(block.size for block in blocks) <= usage <= len(source)


def test_nine_tokens_of_ten():
    """Every tenth token is another one, so that no run of right ones is long."""
    _, output = edited("server/queue.py", inserted)
    rng = random.Random(5)
    prediction = [rng.randrange(1, VOCAB) if i % 10 == 9 else token for i, token in enumerate(output)]
    engine = engine_that_writes(output)
    assert run(engine, [asked(output, prediction)]).tokens["r"] == list(output)
    assert passes(engine) <= len(output) / 4


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("k", "proposer"), [(4, "model"), (None, "ngram")])
def test_tokens_do_not_depend_on_prediction_proposer_or_k(proposer, k, sampling):
    """Where the model is not certain, too, in one ragged batch of predictions that are right, edited and wrong."""
    source, output = edited("engine/stats.py", renamed)
    source, output = source[:150], output[:150]
    rng = random.Random(7)
    wrong = [rng.randrange(1, VOCAB) for _ in output]
    speculation = {} if k is None else {"mode": SpeculationMode.FIXED, "num_draft_tokens": k}
    law, unsure = writes(output), hashed_law(VOCAB, salt=3)
    laws = {"law": lambda context: 0.2 * law(context) + unsure(context), "draft_law": hashed_law(VOCAB, salt=9)}
    sizes = {"vocab_size": VOCAB, "num_pages": 80, "page_size": 8, "max_model_len": 400, "max_batch_tokens": 200}
    plain = run(fake_engine(**laws, **sizes), [asked(output, sampling=sampling, mode=SpeculationMode.OFF)])
    own = plain.tokens["r"]
    predictions = {"none": (), "right": own, "edited": [*own[:50], 1, 2, *own[60:]], "source": source, "wrong": wrong}
    engine = fake_engine(**laws, **sizes)
    together = [
        asked(output, text, name=name, sampling=sampling, proposer=proposer, **speculation)
        for name, text in predictions.items()
    ]
    outputs = run(engine, together)
    assert outputs.tokens == dict.fromkeys(predictions, own)
    right = outputs.finished["right"]
    assert right.accepted_prediction_tokens == len(own)
    if proposer != "none" and k != 0:
        most = 64 if k is None else k
        assert right.stats.drafted == right.stats.accepted
        assert right.stats.rounds <= -(-len(own) // (most + 1)) + 5


def test_usage_is_the_same_without_drafts():
    source, output = edited("engine/stats.py", deleted)
    counts = {
        run(engine_that_writes(output), [asked(output, source, **how)]).finished["r"].accepted_prediction_tokens
        for how in ({}, {"mode": SpeculationMode.OFF}, {"mode": SpeculationMode.FIXED, "num_draft_tokens": 3})
    }
    assert len(counts) == 1


def test_rejection_keeps_what_is_certain():
    source, output = edited("engine/stats.py", inserted)
    engine = engine_that_writes(output)
    done = run(engine, [asked(output, source, verification=Verification.REJECTION, sampling={"temperature": 1.0})])
    assert done.tokens["r"] == list(output)
    assert passes(engine) <= len(output) / 4


def test_a_continued_output_finds_its_place_again():
    source, output = edited("client/results.py", inserted)
    engine, half = engine_that_writes(output), len(output) // 2
    request = asked(output, source, emitted=(ReceivedOutput(token_ids=output[:half]),))
    outputs = Outputs()
    engine.add(request)
    while engine.has_work:
        outputs.take(engine.step().events)
    assert outputs.tokens["r"] == list(output[half:])
    assert passes(engine) <= len(output) / 8
    whole = run(engine_that_writes(output), [asked(output, source)])
    assert outputs.finished["r"].accepted_prediction_tokens == whole.finished["r"].accepted_prediction_tokens


def test_every_output_of_a_request_has_its_own_place():
    source, output = edited("engine/stats.py", redocumented)
    outputs = run(engine_that_writes(output), [asked(output, source, sampling={"n": 3, "temperature": 1.0})])
    assert [tokens == list(output) for tokens in outputs.tokens.values()] == [True] * 3


@pytest.mark.parametrize("name", ["follow", "drafts"])
def test_a_fault_of_the_prediction_costs_speed_alone(name, monkeypatch):
    source, output = edited("engine/stats.py", renamed)
    engine = engine_that_writes(output)

    def fault(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(TextAlignment, name, fault)
    outputs = run(engine, [asked(output, source)])
    assert outputs.tokens["r"] == list(output)
    assert outputs.finished["r"].accepted_prediction_tokens == 0
