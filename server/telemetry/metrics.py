"""Prometheus metrics and the page `/metrics`. The caller passes the registry.

Every series exists from the start, except `cache_config_info`, whose labels depend on the model. In the OpenMetrics
format, which Prometheus requests, histograms contain exemplars: the trace id of one request per bucket.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pilotfish.engine.params import MAX_NUM_DRAFT, MAX_PREDICTED_DRAFTS
from pilotfish.engine.stats import Clock, ForwardKind, StepStats
from pilotfish.engine.types import FinishReason
from pilotfish.server import version
from pilotfish.server.streams.stream import Timeline

PHASES = ("plan", "launch", "propose", "forward", "verify", "commit", "land")
REJECTIONS = (
    "invalid", "unsupported", "not_found", "duplicate", "queue_full", "quota", "unavailable", "deadline", "resume",
    "internal",
)  # fmt: skip

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
DRAFT_BUCKETS = (*range(MAX_NUM_DRAFT + 1), 24, 32, 48, MAX_PREDICTED_DRAFTS)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 17)


# Counters by the field of `StepStats` that they sum up.
_OF_STEPS = {
    "rounds": ("spec_drafts", "Rounds in which drafts were verified."),
    "drafted": ("spec_draft_tokens", "Drafted tokens."),
    "accepted": ("spec_accepted_tokens", "Accepted draft tokens."),
    "generated_tokens": ("generated_tokens", "Generated tokens."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens processed by the target, including recomputed ones."),
    "preempted": ("preemptions", "Preemptions of sequences."),
    "prefix_lookups": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "draft_failures": ("draft_failures", "Proposer failures; the step continued without its drafts."),
}


class _Makers:
    """Constructors of metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counter = partial(Counter, namespace="pilotfish", registry=registry)
        self.gauge = partial(Gauge, namespace="pilotfish", registry=registry)
        self.histogram = partial(Histogram, namespace="pilotfish", registry=registry)
        self.registry = registry

    def seconds(self, name: str, help_text: str) -> Histogram:
        return self.histogram(f"{name}_seconds", help_text, buckets=_SECONDS)


class Metrics:
    """All metrics, grouped by their source: steps, requests, the server itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry, make = registry, _Makers(registry)
        self.steps, self.requests = StepMetrics(make), RequestMetrics(make)
        self.engine_up = make.gauge("engine_up", "1 while the engine can run steps, otherwise 0.")
        self.restarts = make.counter("engine_restarts", "Engine restarts after a failure.")
        self.model_load = make.gauge("model_load_seconds", "Time from the start of the process to ready.")
        self.loop_lag = make.seconds("event_loop_lag", "Delay of a timer on the event loop, ten samples per second.")
        build = make.gauge("build_info", "Always 1; the label is the version.", ["version"])
        build.labels(version()).set(1)


class StepMetrics:
    """Metrics that are updated after each step."""

    def __init__(self, make: _Makers) -> None:
        kinds = get_args(ForwardKind)
        size = make.histogram("batch_size", "Sequences per forward pass.", ["kind"], buckets=_SIZES)
        tokens = make.histogram("batch_tokens", "Tokens per forward pass.", ["kind"], buckets=_TOKENS)
        phase = make.histogram("step_duration_seconds", "Duration of one phase of a step.", ["phase"], buckets=_SECONDS)
        about = "Rounds that accepted the draft at this position."
        position = make.counter("spec_accepted_tokens_per_position", about, ["position"])
        self._size = {kind: size.labels(kind) for kind in kinds}
        self._tokens = {kind: tokens.labels(kind) for kind in kinds}
        self._phases = {name: phase.labels(name) for name in PHASES}
        self._positions = [position.labels(str(i)) for i in range(MAX_PREDICTED_DRAFTS)]
        self._counters = {field: make.counter(name, about) for field, (name, about) in _OF_STEPS.items()}
        about = "Acceptance length of a step: 1 + accepted drafts per round."
        self._length = make.histogram("spec_acceptance_length", about, buckets=_LENGTHS)
        self._num_draft = NumDrafts(make.registry)
        about = "Estimated tokens per second in recent steps, relative to plain decoding."
        self._gain = make.gauge("spec_gain_ratio", about)
        self._gain.set(1)
        about = "CPU threads of the last pass; fewer than configured if that is faster."
        self._threads = make.gauge("compute_threads", about)
        self._steps = make.counter("engine_steps", "Steps of the engine.")
        self._last = make.gauge("engine_last_step_timestamp_seconds", "End of the last step, in Unix time.")

    def observe(self, stats: StepStats) -> None:
        for forward in stats.forwards:
            self._size[forward.kind].observe(forward.sequences)
            self._tokens[forward.kind].observe(forward.tokens)
        for name, seconds in stats.phase_seconds.items():
            self._phases[name].observe(seconds)
        for field, counter in self._counters.items():
            counter.inc(getattr(stats, field))
        self._gain.set(stats.spec_gain)
        self._threads.set(stats.threads)
        self._last.set_to_current_time()
        self._steps.inc()
        self._num_draft.observe(stats.sequences_per_num_draft)
        if stats.rounds:
            self._length.observe(1 + stats.accepted / stats.rounds)
            for position, kept in zip(self._positions, stats.accepted_per_position, strict=False):
                position.inc(kept)


class NumDrafts(Collector):
    """The histogram of K. A step has a value per sequence, so they are counted by K, and put into buckets on export."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts = Counts[int]()  # sequences by K
        registry.register(self)

    def observe(self, sequences_per_num_draft: Sequence[int]) -> None:
        """Add a step, in which `sequences_per_num_draft[K]` sequences had K drafts."""
        self._counts.update(dict(enumerate(sequences_per_num_draft)))

    def collect(self) -> Iterator[Metric]:
        about = "Drafts per sequence and step (K); 0 is plain decoding."
        counts = dict(self._counts)
        up_to = [(str(float(bound)), sum(counts[k] for k in counts if k <= bound)) for bound in DRAFT_BUCKETS]
        buckets = [*up_to, ("+Inf", sum(counts.values()))]
        total = sum(k * count for k, count in counts.items())
        yield HistogramMetricFamily("pilotfish_draft_tokens_per_sequence", about, buckets, total)


class RequestMetrics:
    """Metrics that are updated when requests are refused, start, receive tokens and end."""

    def __init__(self, make: _Makers) -> None:
        total = make.counter("requests", "Ended requests, by the reason of their last output.", ["finish_reason"])
        rejected = make.counter("admission_rejected", "Requests refused before they were queued.", ["reason"])
        self._ended = {reason: total.labels(reason.value) for reason in FinishReason}
        self._rejected = {reason: rejected.labels(reason) for reason in REJECTIONS}
        self._running = make.gauge("requests_running", "Running outputs: sequences that take part in steps.")
        about = "Queued requests, and outputs of other requests that wait to take part in steps."
        self._waiting = make.gauge("requests_waiting", about)
        about = "Usage of the queue's limit on requests or tokens, whichever is higher; 1 is full."
        self.queue_usage = make.gauge("queue_usage_ratio", about)
        self._kv_usage = make.gauge("kv_usage_ratio", "Share of the target's K/V pages in use, 0 to 1.")
        about = "Always 1; the labels are the target's block_size (tokens per page) and num_gpu_blocks (its pages)."
        self.cache_config = make.gauge("cache_config_info", about, ["block_size", "num_gpu_blocks"])
        self._queue = make.seconds("queue_time", "Time from arrival to the engine.")
        self._first = make.seconds("time_to_first_token", "Time from arrival to the first token of an output.")
        self._gap = make.seconds("inter_token_latency", "Time between two deliveries of tokens of one output.")
        self._per_token = make.seconds("time_per_output_token", "Mean time per token of an output after its first.")
        self._duration = make.seconds("request_duration", "Time from arrival to the end.")
        self.disconnects = make.counter("client_disconnects", "Requests whose caller disconnected before the end.")
        self.stalls = make.counter("stream_stalls", "Streams aborted because their client did not read.")
        about = "Requests interrupted by an engine failure, counted at each failure."
        self.interruptions = make.counter("interrupted_requests", about)
        about = "Requests that resumed an interrupted stream of another server or connection."
        self.resumes = make.counter("resumed_requests", about)

    def reject(self, reason: str) -> None:
        self._rejected[reason].inc()

    def start(self, timeline: Timeline) -> None:
        """Observe the queue time of a request that was submitted to the engine."""
        assert timeline.started is not None, "a start without a time"
        self._queue.observe(timeline.started - timeline.arrived, _exemplar(timeline))

    def deliver(self, timeline: Timeline, previous: float | None) -> None:
        """Observe a delivery of tokens to an output; `previous` is the time of the last one."""
        assert timeline.last_token is not None, "a delivery without tokens"
        if previous is None:
            self._first.observe(timeline.last_token - timeline.arrived, _exemplar(timeline))
        else:
            self._gap.observe(timeline.last_token - previous)

    def end(self, reason: FinishReason, timeline: Timeline) -> None:
        """Count a request that ended; `reason` is that of its last output."""
        assert timeline.ended is not None, "an end without a time"
        self._ended[reason].inc()
        self._duration.observe(timeline.ended - timeline.arrived, _exemplar(timeline))

    def end_output(self, timeline: Timeline, num_tokens: int) -> None:
        """Observe the mean time per token of an output whose request ended."""
        if num_tokens > 1 and timeline.first_token is not None and timeline.last_token is not None:
            self._per_token.observe((timeline.last_token - timeline.first_token) / (num_tokens - 1))

    def set_load(self, running: int, waiting: int, kv_usage: float) -> None:
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(kv_usage)


def _exemplar(timeline: Timeline) -> dict[str, str] | None:
    """Return the trace of an observation as an exemplar; None if the request is not traced."""
    return {"trace_id": timeline.trace_id} if timeline.trace_id else None


async def watch_lag(observe: Callable[[float], None], clock: Clock, every_seconds: float = 0.1) -> None:
    """Sleep repeatedly, and pass each sleep's delay in seconds to `observe`; other work on the event loop causes it."""
    while True:
        due = clock() + every_seconds
        await asyncio.sleep(every_seconds)
        observe(max(0.0, clock() - due))


# vLLM's names of our metrics. Units and meanings are equal, so dashboards and autoscalers for vLLM work. Histograms
# keep our buckets.
VLLM_NAMES = {
    "pilotfish_requests_running": "vllm:num_requests_running",
    "pilotfish_requests_waiting": "vllm:num_requests_waiting",
    "pilotfish_kv_usage_ratio": "vllm:kv_cache_usage_perc",  # a fraction from 0 to 1, as in vLLM
    "pilotfish_cache_config_info": "vllm:cache_config_info",
    "pilotfish_prefix_cache_queries": "vllm:prefix_cache_queries",
    "pilotfish_prefix_cache_hits": "vllm:prefix_cache_hits",
    "pilotfish_preemptions": "vllm:num_preemptions",
    "pilotfish_prompt_tokens": "vllm:prompt_tokens",
    "pilotfish_generated_tokens": "vllm:generation_tokens",
    "pilotfish_requests": "vllm:request_success",
    "pilotfish_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "pilotfish_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "pilotfish_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "pilotfish_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "pilotfish_queue_time_seconds": "vllm:request_queue_time_seconds",
    "pilotfish_spec_drafts": "vllm:spec_decode_num_drafts",
    "pilotfish_spec_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "pilotfish_spec_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "pilotfish_spec_accepted_tokens_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
_VLLM_LABELS = {"finish_reason": "finished_reason"}


class Exposition(Collector):
    """All metrics of a registry; with `vllm_model`, also a copy under vLLM's names for that model."""

    def __init__(self, registry: CollectorRegistry, vllm_model: str | None = None) -> None:
        self._registry = registry
        self._vllm_labels = None if vllm_model is None else {"model_name": vllm_model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Yield every family without its `_created` series, which would double the page."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if self._vllm_labels is not None and family.name in VLLM_NAMES:
                yield _renamed(family, VLLM_NAMES[family.name], self._vllm_labels)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, in the format requested by the Accept header."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # invalid parameters, such as version=x
            encode, content_type = choose_encoder("")
        return encode(self), content_type


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        Sample(
            name + sample.name.removeprefix(family.name),
            {**labels, **{_VLLM_LABELS.get(key, key): value for key, value in sample.labels.items()}},
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in family.samples
    ]
    return renamed
