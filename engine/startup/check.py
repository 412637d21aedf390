"""`pilotfish check`: whether and how this machine can run a pair of models.

Reads configs first, and loads weights only on request. Errors become problems of the returned report.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from pilotfish.engine.choices import Weights
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import PilotfishError, one_line
from pilotfish.engine.kv.arena import KVLayout
from pilotfish.engine.machine.threads import cores, quota
from pilotfish.engine.model import checkpoint
from pilotfish.engine.model.decoder import shapes
from pilotfish.engine.model.decoder.load import check as check_shapes
from pilotfish.engine.model.decoder.load import prepared
from pilotfish.engine.model.linear.grouped import kernel_name
from pilotfish.engine.model.published.files import read_headers
from pilotfish.engine.model.published.methods import read_weights, without_quantisation
from pilotfish.engine.model.text_part import names_in_whole
from pilotfish.engine.native import instructions
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.proposers.sources import DraftSource, draft_sources
from pilotfish.engine.proposers.vocab import DraftVocabulary, VocabMap
from pilotfish.engine.startup import warm
from pilotfish.engine.startup.build import max_model_len, pages_within, pick_device
from pilotfish.engine.startup.drafters import read_vocabulary
from pilotfish.engine.startup.implementation import Implementation
from pilotfish.engine.startup.memory import GIB, DeviceMemory, kv_gib
from pilotfish.engine.startup.precision import HeldPrecision, held_as
from pilotfish.engine.text.codec import Codec

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedConfig

    from pilotfish.engine.model.published.base import Codes

_READABLE = (PilotfishError, ValueError, RuntimeError, OSError, MemoryError)  # their texts explain the problem


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    section: str  # environment, target, draft, pair or load
    name: str
    value: str


@dataclass(slots=True)
class CheckReport:
    """The findings, in order; `problems`: reasons why the pair cannot be served."""

    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The report for programs: sections of names and values, the problems, and `works`."""
        sections: dict[str, dict[str, str]] = {}
        for finding in self.findings:
            sections.setdefault(finding.section, {})[finding.name] = finding.value
        return {"works": self.works, "problems": self.problems, **sections}


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of one checkpoint that can be read without its weights.

    Attributes:
        config: of the checkpoint.
        device: the device on which it would run.
        layout: of its arena.
        held: its formats in memory.
        runs_in: its implementation.
        weight_bytes: of all weights in memory.
        class_name: of the transformers module; empty for a decoder.
        codec: its tokenizer.
        vocabulary: its tokens, and the width of the logits.
        end_tokens: its end tokens.
    """

    config: PreTrainedConfig
    device: torch.device
    layout: KVLayout
    held: HeldPrecision
    runs_in: Implementation
    weight_bytes: int
    class_name: str
    codec: Codec | None
    vocabulary: DraftVocabulary
    end_tokens: frozenset[int]
    has_chat_template: bool

    @classmethod
    def read(cls, name: str, revision: str | None, asked: Weights, config: EngineConfig) -> Facts:
        """Read configs and tokenizer of a checkpoint, and the headers of its files if it is quantised."""
        described, device = checkpoint.read_config(name, revision), pick_device(config.device)
        runs_in, class_name = Implementation.of(config, described, device), ""
        held = held_as(config, name, revision, asked, device, described=described)
        checkpoint.check_weights(name)
        weights: Mapping[str, torch.Tensor | Codes] = {}
        if held.quantisation is not None:  # also refuses incomplete checkpoints
            weights = read_weights(name, revision, held.quantisation, read_headers)
        if runs_in.share is None or runs_in.architecture is None:
            from pilotfish.engine.model.fallback import kv_layout, on_meta

            described = checkpoint.read_config(name, revision, of_transformers=True)
            with checkpoint.as_model_error(name):
                model = on_meta(without_quantisation(described))
            layout, class_name = kv_layout(described, held.dtype), type(model).__name__
            weight_bytes = sum(weight.numel() for weight in model.parameters()) * held.dtype.itemsize
            width = model.get_output_embeddings().weight.shape[0]
        else:
            layout, width = KVLayout(runs_in.share.kv, held.dtype), runs_in.architecture.vocab_size
            codes: dict[str, Codes] = {}
            if weights:
                weights = prepared(weights, runs_in.architecture, (names_in_whole(described) or {}).items())
                check_shapes(name, runs_in.architecture, weights)
                codes = {key: found for key, found in weights.items() if not isinstance(found, torch.Tensor)}
                codes = {key: found for key, found in codes.items() if held.keeps_codes and found.num_bytes}
            on_cuda = device.type == "cuda"
            weight_bytes = shapes.num_bytes(runs_in.share, held.dtype, held.weights, codes, on_cuda=on_cuda)
        with checkpoint.as_model_error(name):
            generation = checkpoint.read_end_tokens(name, revision)
            ends = checkpoint.end_tokens_of(described, generation)
            has_chat_template = checkpoint.has_chat_template(name, revision)
        return cls(
            described, device, layout.stored_as(config.kv_cache_dtype), held, runs_in, weight_bytes, class_name,
            Codec.load(name, revision), read_vocabulary(name, revision, width, described, ends), ends,
            has_chat_template,
        )  # fmt: skip

    def lines(self) -> Iterator[tuple[str, str]]:
        """The lines of the report: names and values."""
        known = checkpoint.positions(self.config)
        yield "family", self.config.model_type + (f" ({self.class_name})" if self.class_name else "")
        yield "runs in", str(self.runs_in)
        yield "layers", _layers(self.layout)
        rounded, dtype = self.held.matrices, self.held.type_name
        kernel = "our Triton" if self.device.type == "cuda" else kernel_name()
        kernel = "torch's" if self.held.weights == "fp8" else kernel
        held = dtype if rounded == "native" else f"{rounded} ({kernel} kernel), the rest in {dtype}"
        yield "type", str(self.held)
        yield "weights", f"{_size(self.weight_bytes)} in {held}"
        yield "rounded", self.held.rounding(self.device)
        rounded = " in int8" if self.layout.is_rounded else ""
        yield "K/V", f"{self.layout.bytes_per_token} bytes per token{rounded}"
        yield "context", f"{known.limit} tokens ({known.reason})"
        tokens = f", {len(self.vocabulary.ids)} tokens" if self.codec else ""
        yield "vocabulary", f"{self.vocabulary.width} logits{tokens}"
        yield "tokenizer", "present" if self.codec else "none: token ids only"
        yield "chat template", "present" if self.has_chat_template else "none"
        yield "end tokens", self.ends() or "none: outputs end by length only"

    def ends(self) -> str:
        """The end tokens, with their names if there is a tokenizer: `2 </s>`."""
        names = None if self.codec is None else self.codec.tokenizer.id_to_token
        return one_line(", ".join(f"{i} {names(i)}" if names else str(i) for i in sorted(self.end_tokens)))


def check(config: EngineConfig, *, load: bool = True) -> CheckReport:
    """Check the machine, each checkpoint and their compatibility, and with `load` whether they run."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings are in the report
    report = CheckReport()
    with collected_problems(report):
        for name, value in environment(config):
            report.findings.append(Finding("environment", name, value))
    target = _read(report, "target", config.target, config.revision, config.weights, config)
    sources, draft = dict[str, DraftSource](), None
    with collected_problems(report):
        sources = draft_sources(config)
    if (source := sources.get("model")) is not None:
        weights = config.draft_weights or config.weights
        whole = config.model_copy(update={"tensor_parallel_size": 1})
        draft = _read(report, "draft", source.name, source.revision, weights, whole)
    if target is not None and bool(sources) == bool(config.draft) and (draft is not None or source is None):
        _check_pair(report, config, target, draft, sources)
    if load and report.works:
        _check_load(report, config)
    return report


def environment(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Report the machine and its software."""
    yield "python", platform.python_version()
    for package in ("torch", "transformers", "tokenizers"):
        yield package, version(package)
    allowed = quota()
    limit = "" if allowed is None else f", quota {allowed:g} (cgroup)"
    threads = config.threads or cores()
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}{limit}; at most {threads} threads"
    limit = _cgroup("memory.max")
    yield (
        "memory",
        f"{_size(_free_memory())} free" + (f", limit {_size(int(limit))} (cgroup)" if limit.isdigit() else ""),
    )
    yield "device", _device(config)
    if pick_device(config.device).type == "cpu":
        yield "kernels", instructions()


def _device(config: EngineConfig) -> str:
    device = pick_device(config.device)
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def _cgroup(name: str) -> str:
    """Read a limit of this process's control group; empty where there is none."""
    try:
        return (Path("/sys/fs/cgroup") / name).read_text("ascii").strip()
    except OSError:
        return ""


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def collected_problems(report: CheckReport) -> Iterator[None]:
    """Turn any error inside the block into a problem of the report."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # an invalid checkpoint can cause any error
        problem = one_line(str(error) if isinstance(error, _READABLE) and str(error) else repr(error))
        if problem not in report.problems:  # one cause may affect several lines
            report.problems.append(problem)


def _read(
    report: CheckReport, section: str, name: str, revision: str | None, weights: Weights, config: EngineConfig,
) -> Facts | None:  # fmt: skip
    report.findings.append(Finding(section, "name", name + (f" at {revision}" if revision else "")))
    facts: Facts | None = None
    with collected_problems(report):
        facts = Facts.read(name, revision, weights, config)
        report.findings += [Finding(section, *line) for line in facts.lines()]
    return facts


def _check_pair(
    report: CheckReport, config: EngineConfig, target: Facts, draft: Facts | None, sources: Mapping[str, DraftSource],
) -> None:  # fmt: skip
    models = [target] if draft is None else [target, draft]

    def add(name: str, value: Callable[[], str]) -> None:
        with collected_problems(report):
            report.findings.append(Finding("pair", name, value()))

    if draft is not None:
        add("vocabulary", lambda: _vocabularies(target, draft))
        add("end tokens", lambda: _ends(target, draft))
    add(
        "drafts",
        lambda: ", ".join(f"{kind} ({source.entry})" for kind, source in sources.items()) or "n-grams only",
    )
    add("proposer", lambda: _proposer(config))
    add("rule", lambda: str(config.verification))
    if config.tensor_parallel_size > 1:
        add("shares", lambda: _shares(config, target))
    add("context", lambda: f"{max_model_len(config, [model.config for model in models])} tokens")
    add("K/V pages", lambda: _pages(config, models))
    add("weights", lambda: _weights(models))


def _vocabularies(target: Facts, draft: Facts) -> str:
    ours, theirs = target.vocabulary, draft.vocabulary
    found = VocabMap.between(ours, theirs)
    if found is None:
        return "the same" if ours.ids and theirs.ids else "of one size, assumed to be the same (a tokenizer is missing)"
    if ours.ids == theirs.ids:
        return f"the same tokens, logits padded to {ours.width} and {theirs.width}"
    return f"mapped: {found.num_shared} of the target's {found.num_tokens} tokens shared"


def _ends(target: Facts, draft: Facts) -> str:
    if target.end_tokens == draft.end_tokens:
        return "the same"
    return f"target {target.ends() or 'none'}; draft {draft.ends() or 'none'} (outputs end at the target's)"


def _proposer(config: EngineConfig) -> str:
    if config.speculation is SpeculationMode.OFF:
        return "none (speculation is off)"
    chosen = config.proposer or ("auto" if config.draft else "ngram")
    return f"{chosen}, up to {config.num_draft_tokens} drafts ({config.speculation})"


def _shares(config: EngineConfig, target: Facts) -> str:
    heads = max(layer.heads for layer in target.layout.layers if layer is not None)
    return f"{config.tensor_parallel_size} of the target, one per process of torchrun, K/V heads {heads} each"


def _layers(layout: KVLayout) -> str:
    """The layers of a model, and their K/V per position."""
    attending = [layer for layer in layout.layers if layer is not None]
    shapes = Counter(f"{layer.heads} K/V heads of {layer.key_dim}" for layer in attending)
    kinds = " and ".join(shapes) if len(shapes) < 2 else ", ".join(f"{n} with {shape}" for shape, n in shapes.items())
    found = len(layout.layers)
    if len(attending) < found:
        return f"{found}, {len(attending)} with attention ({kinds or 'none'})"
    return f"{found}, with {kinds}" if len(shapes) == 1 else f"{found}: {kinds}"


def _pages(config: EngineConfig, models: list[Facts]) -> str:
    limit = max_model_len(config, [model.config for model in models])
    size, layouts = min(config.page_size or limit, limit), [model.layout for model in models]
    memory = kv_gib(config, pick_device(config.device), models[0].config, partial(_memory_after, models))
    pages = pages_within(memory, config.max_batch_size, layouts, size, limit)
    taken = pages * size * sum(layout.bytes_per_token for layout in layouts)
    return f"{pages} of {size} tokens, {_size(taken)} (kv_memory is {memory:.3g} GiB)"


def _memory_after(models: list[Facts], device: torch.device) -> DeviceMemory:
    """A GPU's memory after loading the weights."""
    return DeviceMemory.of(device).holding(sum(model.weight_bytes for model in models))


def _weights(models: list[Facts]) -> str:
    wanted, free = sum(model.weight_bytes for model in models), _free_memory()
    return _size(wanted) + (f", more than the {_size(free)} that are free" if wanted > free else "")


def _check_load(report: CheckReport, config: EngineConfig) -> None:
    with collected_problems(report):
        start = perf_counter()
        warm.load(config, calibrates=False)
        report.findings.append(
            Finding("load", "self-test", f"passed; loaded and ran in {perf_counter() - start:.1f} s")
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"
