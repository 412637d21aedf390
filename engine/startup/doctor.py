"""The doctor checks whether this machine can run this pair, how, and if not, why.

It reads configs first and loads weights only if asked. It returns a report and prints nothing. An error while reading
becomes a problem in the report, never a traceback.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from engine.choices import HEADS, Weights
from engine.config import EngineConfig
from engine.errors import PilotfishError, one_line
from engine.kv.arena import KVLayout
from engine.machine.threads import cores, quota
from engine.model import checkpoint
from engine.model.fusion.latent import has_latents
from engine.model.linear.grouped import kernel_name
from engine.model.published.files import read_headers
from engine.model.published.load import num_bytes, read_weights
from engine.model.quantize import weight_bytes
from engine.model.runner import kv_layout
from engine.native import instructions
from engine.parallel.shards import check_shards, shard_layout
from engine.params import SpeculationMode
from engine.proposers.vocab import DraftVocabulary, VocabMap
from engine.startup import warm
from engine.startup.build import max_model_len, pages_within, pick_device
from engine.startup.drafters import read_vocabulary
from engine.startup.memory import GIB, DeviceMemory, kv_gib
from engine.startup.precision import HeldPrecision, held_as, on_meta
from engine.text.codec import Codec

_TOLD = (PilotfishError, ValueError, RuntimeError, OSError, MemoryError)  # whose texts are for people


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    section: str  # environment, target, draft, pair or load
    name: str
    value: str


@dataclass(slots=True)
class DoctorReport:
    """What was found, in order; `problems` are reasons why the pair cannot be served."""

    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether the pair can be served."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The report for programs: sections of names and values, the problems, and `works`."""
        sections: dict[str, dict[str, str]] = {}
        for finding in self.findings:
            sections.setdefault(finding.section, {})[finding.name] = finding.value
        return {"works": self.works, "problems": self.problems, **sections}


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of one checkpoint that can be read without its weights."""

    config: PreTrainedConfig
    layout: KVLayout
    held: HeldPrecision
    weight_bytes: int
    kernel: str  # the kernel that multiplies rounded weights
    class_name: str
    codec: Codec | None
    vocabulary: DraftVocabulary
    end_tokens: frozenset[int]
    has_chat_template: bool
    rounding: str  # what is rounded, in words

    @classmethod
    def read(cls, name: str, revision: str | None, asked: Weights, config: EngineConfig) -> Facts:
        """Read configs and tokenizer, and build the model on the meta device, where weights take no memory."""
        described = checkpoint.read_config(name, revision, of_transformers=True)
        device = pick_device(config.device)
        held = held_as(config, name, revision, asked, device, described=described)
        checkpoint.check_weights(name)
        model = on_meta(name, described)
        with checkpoint.told_as_model_error(name):
            generation = checkpoint.read_end_tokens(name, revision)
            ends = checkpoint.end_tokens_of(described, generation)
            has_chat_template = checkpoint.has_chat_template(name, revision)
        codec, width = Codec.load(name, revision), model.get_output_embeddings().weight.shape[0]
        codes = _bytes_of_codes(name, revision, held, model)
        compressed = config.tensor_parallel_size == 1 and has_latents(model)
        return cls(
            config=described,
            layout=kv_layout(described, held.dtype, compressed=compressed).stored_as(config.kv_cache_dtype),
            held=held,
            weight_bytes=codes + weight_bytes(model, held.dtype, held.weights, on_cuda=device.type == "cuda"),
            kernel="torch's" if held.weights == "fp8" else "our Triton" if device.type == "cuda" else kernel_name(),
            class_name=type(model).__name__,
            codec=codec,
            vocabulary=read_vocabulary(name, revision, width, described, ends),
            end_tokens=ends,
            has_chat_template=has_chat_template,
            rounding=held.rounding(device),
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """The lines of the report: names and values."""
        known = checkpoint.positions(self.config)
        yield "family", f"{self.config.model_type} ({self.class_name})"
        yield "layers", _layers(self.layout)
        rounded, dtype = self.held.matrices, self.held.type_name
        held = dtype if rounded == "native" else f"{rounded} ({self.kernel} kernel), the rest in {dtype}"
        yield "type", str(self.held)
        yield "weights", f"{_size(self.weight_bytes)} in {held}"
        yield "rounded", self.rounding
        rounded = " in int8" if self.layout.is_rounded else ""
        yield "K/V", f"{self.layout.bytes_per_token} bytes per token{rounded}"
        yield "context", f"{known.limit} tokens ({known.reason})"
        tokens = f", {len(self.vocabulary.ids)} tokens" if self.codec else ""
        yield "vocabulary", f"{self.vocabulary.width} logits{tokens}"
        yield "tokenizer", "present" if self.codec else "none: takes and gives token ids alone"
        yield "chat template", "present" if self.has_chat_template else "none"
        yield "end tokens", self.ends() or "none: outputs end by length alone"

    def ends(self) -> str:
        """The end tokens, with their names where there is a tokenizer: `2 </s>`."""
        names = None if self.codec is None else self.codec.tokenizer.id_to_token
        return one_line(", ".join(f"{i} {names(i)}" if names else str(i) for i in sorted(self.end_tokens)))


def _bytes_of_codes(name: str, revision: str | None, held: HeldPrecision, model: PreTrainedModel) -> int:
    """Bytes of the codes of a published checkpoint, whose matrices are taken out of `model` if they are kept.

    Raises:
        ModelError: a tensor is missing, or of another shape or type.
    """
    if held.quantisation is None:
        return 0
    weights = read_weights(name, revision, held.quantisation, read_headers)
    return num_bytes(model, weights, keeps_codes=held.keeps_codes)


def check(config: EngineConfig, *, load: bool = True) -> DoctorReport:
    """Check the machine, each checkpoint and how they fit together, and then, with `load`, whether they run."""
    logging.set_verbosity_error()  # the report contains what transformers would warn of
    report = DoctorReport()
    with problems_told(report):
        for name, value in environment(config):
            report.findings.append(Finding("environment", name, value))
    target = _read(report, "target", config.target, config.revision, config.weights, config)
    draft = None
    if config.draft is not None:
        weights = config.draft_weights or config.weights
        draft = _read(report, "draft", config.draft, config.draft_revision, weights, config)
    if target is not None and (draft is not None or config.draft is None):
        _check_pair(report, config, target, draft)
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
def problems_told(report: DoctorReport) -> Iterator[None]:
    """Turn any error inside the block into a problem of the report."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever a stranger's checkpoint makes a library raise
        problem = one_line(str(error) if isinstance(error, _TOLD) and str(error) else repr(error))
        if problem not in report.problems:  # one cause may make several lines fail
            report.problems.append(problem)


def _read(
    report: DoctorReport, section: str, name: str, revision: str | None, weights: Weights, config: EngineConfig
) -> Facts | None:
    report.findings.append(Finding(section, "name", name + (f" at {revision}" if revision else "")))
    facts: Facts | None = None
    with problems_told(report):
        facts = Facts.read(name, revision, weights, config)
        report.findings += [Finding(section, *line) for line in facts.lines()]
    return facts


def _check_pair(report: DoctorReport, config: EngineConfig, target: Facts, draft: Facts | None) -> None:
    models = [target] if draft is None else [target, draft]

    def tell(name: str, say: Callable[[], str]) -> None:
        with problems_told(report):
            report.findings.append(Finding("pair", name, say()))

    if draft is not None:
        tell("vocabulary", lambda: _vocabularies(target, draft))
        tell("end tokens", lambda: _ends(target, draft))
    tell("proposer", lambda: _proposer(config))
    tell("rule", lambda: str(config.verification))
    if config.tensor_parallel_size > 1:
        tell("shares", lambda: _shares(config, target))
    tell("context", lambda: f"{max_model_len(config, [model.config for model in models])} tokens")
    tell("K/V pages", lambda: _pages(config, models))
    tell("weights", lambda: _weights(models))


def _vocabularies(target: Facts, draft: Facts) -> str:
    ours, theirs = target.vocabulary, draft.vocabulary
    found = VocabMap.between(ours, theirs)
    if found is None:
        return "the same" if ours.ids and theirs.ids else "of one size, taken to be the same: two tokenizers would tell"
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
    drafters = (config.draft, config.self_layers, config.mtp, *(getattr(config, name) for name in HEADS))
    chosen = config.proposer or ("auto" if any(drafters) else "ngram")
    return f"{chosen}, up to {config.num_draft_tokens} drafts ({config.speculation})"


def _shares(config: EngineConfig, target: Facts) -> str:
    share = _share(config, target)
    heads = max(layer.heads for layer in share.layers if layer is not None)
    return f"{config.tensor_parallel_size} of the target, one per process of torchrun, K/V heads {heads} each"


def _layers(layout: KVLayout) -> str:
    """The layers of a model, and what those with attention keep of a position."""
    attending = [layer for layer in layout.layers if layer is not None]
    shapes = Counter(f"{layer.heads} K/V heads of {layer.key_dim}" for layer in attending)
    kinds = " and ".join(shapes) if len(shapes) < 2 else ", ".join(f"{n} with {shape}" for shape, n in shapes.items())
    found = len(layout.layers)
    if len(attending) < found:
        return f"{found}, {len(attending)} of them with attention ({kinds or 'none'})"
    return f"{found}, with {kinds}" if len(shapes) == 1 else f"{found}: {kinds}"


def _share(config: EngineConfig, target: Facts) -> KVLayout:
    """The K/V layout of one shard. Raises ModelError where the model cannot be sharded."""
    check_shards(config.target, target.config, config.tensor_parallel_size)
    return shard_layout(target.layout, target.config, config.tensor_parallel_size)


def _pages(config: EngineConfig, models: list[Facts]) -> str:
    limit = max_model_len(config, [model.config for model in models])
    size, layouts = min(config.page_size or limit, limit), [model.layout for model in models]
    if config.tensor_parallel_size > 1:
        layouts[0] = _share(config, models[0])
    memory = kv_gib(config, pick_device(config.device), models[0].config, partial(_memory_after, models))
    pages = pages_within(memory, config.max_batch_size, layouts, size, limit)
    taken = pages * size * sum(layout.bytes_per_token for layout in layouts)
    return f"{pages} of {size} tokens, {_size(taken)} (kv_memory is {memory:.3g} GiB)"


def _memory_after(models: list[Facts], device: torch.device) -> DeviceMemory:
    """A GPU's memory once the weights are loaded."""
    return DeviceMemory.of(device).holding(sum(model.weight_bytes for model in models))


def _weights(models: list[Facts]) -> str:
    wanted, free = sum(model.weight_bytes for model in models), _free_memory()
    return _size(wanted) + (f", more than the {_size(free)} that are free" if wanted > free else "")


def _check_load(report: DoctorReport, config: EngineConfig) -> None:
    with problems_told(report):
        start = perf_counter()
        warm.load(config, calibrates=False)
        report.findings.append(Finding("load", "probe", f"passed; loaded and ran in {perf_counter() - start:.1f} s"))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"
