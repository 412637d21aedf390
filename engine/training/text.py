"""Generates training texts: prompts if none are given, and continuations, with the target's hidden states.

A draft must predict the target's text, so it is trained on text that the target generates (Zhou et al. 2023,
"DistillSpec", arXiv 2310.08461). The target generates in an engine, so everything that can be served is supported:
rounded weights, GGUF files, recurrent layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.threads import use_threads
from pilotfish.engine.model.checkpoint import shape_of
from pilotfish.engine.model.decoder.architecture import architecture_of
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.stack import FINAL, Tap
from pilotfish.engine.params import SamplingParams, SpeculationMode
from pilotfish.engine.proposers.base import Passed, Proposer
from pilotfish.engine.proposers.heads.features import Features
from pilotfish.engine.startup.build import assemble, load, pick_device
from pilotfish.engine.training.store import TargetParts, TextPlan, WrittenText
from pilotfish.engine.types import Request

Tokens = tuple[int, ...]
SHORTEST = 8  # minimum tokens of a text
_RECORDER = "recorder"  # its name among proposers


def places_of(depth: int) -> tuple[int, int, int]:
    """The places of a target that a head reads, as for published heads; for a shallow target others.

    >>> places_of(32), places_of(4)
    ((2, 16, 29), (1, 2, 3))
    """
    return (2, depth // 2, depth - 3) if depth >= 6 else (depth // 4, depth // 2, depth - 1)


class RowRecorder(Proposer):
    """A proposer without drafts that records hidden states by request: bfloat16 `[positions, (places + 1) * hidden]`.

    The last part is that of `FINAL`. The engine drops failing observers, so `Writer.write` checks that every position
    was recorded.
    """

    def __init__(self, tap: Tap, places: Seq[int]) -> None:
        self._tap, self._places = tap, (*places, FINAL)
        self.kept: dict[str, Features] = {}  # recorded rows by request

    def observe(self, passed: Seq[Passed]) -> None:
        """Record the rows of a pass; recomputed rows after a preemption replace earlier ones."""
        hidden = self._tap.read(self._places)
        assert hidden is not None, "the target has not run"
        hidden = hidden.to("cpu", torch.bfloat16)
        for p in passed:
            kept = self.kept.get(p.sequence.request_id)
            if kept is not None:
                kept.take(p.feed.start, hidden[p.rows_from(p.feed.start)])


class Writer:
    """A target in an engine that records hidden states."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the target of `config`. Raises ModelError if it, or reading its hidden states, is not supported."""
        use_threads(config.threads)
        own = {"proposer": _RECORDER, "speculation": SpeculationMode.FIXED, "num_draft_tokens": 1, "loop": "plain"}
        asked = config.model_copy(update={**own, "prefix_cache": False})  # cached positions would not be recorded
        loaded = load(asked, config.target, config.revision, config.weights, pick_device(config.device))
        if architecture_of(loaded) is None:
            kind = loaded.config.model_type
            raise ModelError(f"target is {config.target!r}; {kind} is not in the table of architectures")
        self.model = cast("DecoderModel", loaded)
        self.places = places_of(shape_of(self.model.config, "num_hidden_layers"))
        tap = Tap(self.model, {*self.places, FINAL})
        self._recorder = RowRecorder(tap, self.places)
        self.engine: Engine = assemble(asked, loaded, extra_proposers={_RECORDER: self._recorder}, tap=tap)

    def write(self, prompts: Seq[Tokens], sampling: Seq[SamplingParams], *, records: bool = True) -> list[WrittenText]:
        """Continue all prompts in one batch; without `records` the texts have no rows.

        Texts that exceed the context are cut, prompts at their beginning.

        Raises:
            ModelError: the engine failed on one of them, or positions were not recorded.
        """
        limit, texts = self.engine.facts.limits.max_model_len, dict[str, list[int]]()
        for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            name, most = f"text-{number}", min(params.max_tokens or limit, limit // 2)
            texts[name] = [*prompt[-(limit - most) :]]
            fitted = replace(params, max_tokens=most)
            self.engine.add(Request(request_id=name, token_ids=tuple(texts[name]), sampling=fitted))
        lengths = [len(tokens) for tokens in texts.values()]
        kept = self._recorder.kept = {name: Features() for name in texts if records}
        while self.engine.has_work:
            for event in self.engine.step().events:
                if event.finished is not None and event.finished.error is not None:
                    raise ModelError(f"the target failed while writing a text: {event.finished.error}")
                texts[event.request_id] += event.token_ids
        for name, rows in kept.items():
            if rows.first or rows.stop < len(texts[name]) - 1:
                raise ModelError(
                    f"only {rows.stop - rows.first} of {len(texts[name]) - 1} positions have hidden states"
                )
        return [
            WrittenText(torch.tensor(tokens), prompt, kept[name].rows[: len(tokens) - 1] if records else torch.empty(0))
            for prompt, (name, tokens) in zip(lengths, texts.items(), strict=True)
        ]

    @torch.inference_mode()
    def parts(self) -> TargetParts:
        """The target's matrices for training; embeddings as received by its layers.

        Raises:
            ModelError: unsupported: the target's logits are not a product of one matrix with its hidden states.
        """
        made, device = self.model.architecture, self.model.device
        kind = self.model.config.model_type
        if made.head_bias:
            raise ModelError(f"{kind} has a bias in its logits, which training does not support")
        if made.embedding_width not in (None, made.width):
            raise ModelError(
                f"{kind} has embeddings of width {made.embedding_width}; expected the hidden size {made.width}"
            )
        table = self.model.get_input_embeddings()(torch.arange(self.engine.facts.limits.vocab_size, device=device))
        unit = torch.eye(made.width, dtype=self.model.dtype, device=device)
        output = self.model.get_output_embeddings()(unit).float().T
        embedding, output = (x.to("cpu", torch.bfloat16).clone() for x in (table, output.contiguous()))
        return TargetParts(embedding, output, made.logit_scale or 1.0, made.softcap)


def own_prompts(
    writer: Writer, opening: Tokens, plan: TextPlan, number: int, *, as_prompt: Callable[[Tokens], Tokens | None] | None
) -> list[Tokens]:
    """Prompts generated by the target from `opening`, sampled at temperature 1, for file `number`.

    `as_prompt` converts a generated text to a prompt, for instance with the opening of an answer; without it a prompt
    is the opening plus the text. Empty texts are dropped.
    """
    length = plan.prompt_tokens // 4
    params = [_drawn(plan, (number, i, 1), length, temperature=1.0) for i in range(plan.together)]
    texts = writer.write([opening] * plan.together, params, records=False)
    written = [tuple(text.tokens[text.prompt :].tolist()) for text in texts]
    ends = writer.engine.facts.limits.eos_token_ids
    bare = [tokens[:-1] if tokens and tokens[-1] in ends else tokens for tokens in written]
    made = [(*opening, *tokens) if as_prompt is None else as_prompt(tokens) for tokens in bare if tokens]
    return [prompt[-plan.prompt_tokens :] for prompt in made if prompt]


def continued(writer: Writer, prompts: Seq[Tokens], plan: TextPlan, number: int) -> list[WrittenText]:
    """Continuations of the prompts of file `number`, greedy or sampled; texts shorter than `SHORTEST` are dropped."""
    dice = random.Random(f"{plan.seed} {number}")  # noqa: S311 - a mixture of data, no secret
    sampling = [
        SamplingParams(max_tokens=plan.tokens)
        if dice.random() < plan.greedy
        else _drawn(plan, (number, i, 2), plan.tokens, plan.temperature)
        for i in range(len(prompts))
    ]
    return [text for text in writer.write(prompts, sampling) if len(text.tokens) >= SHORTEST]


def _drawn(plan: TextPlan, key: tuple[int, ...], tokens: int, temperature: float) -> SamplingParams:
    seed = random.Random(f"{plan.seed} {key}").getrandbits(32)  # noqa: S311 - not a secret
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens)
