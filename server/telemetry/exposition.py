"""The page `/metrics`: its format and the names of the metrics.

Prometheus requests the OpenMetrics format. Its histograms contain exemplars: the trace of one request of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Our names to vLLM's. Units and meanings agree, so that dashboards and autoscalers for vLLM work. Histograms keep our
# own buckets.
VLLM_NAMES = MappingProxyType(
    {
        "pilotfish_requests_running": "vllm:num_requests_running",
        "pilotfish_requests_waiting": "vllm:num_requests_waiting",
        "pilotfish_kv_usage_ratio": "vllm:kv_cache_usage_perc",  # in vLLM it is also a share from 0 to 1
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
)
_VLLM_LABELS = {"finish_reason": "finished_reason"}


class Exposition(Collector):
    """All metrics of a registry; with `vllm_model`, also a copy under vLLM's names for that model."""

    def __init__(self, registry: CollectorRegistry, vllm_model: str | None = None) -> None:
        self._registry = registry
        self._pages: dict[str, bytes] = {}  # by content type
        self._vllm_labels = None if vllm_model is None else {"model_name": vllm_model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Yield every family without its `_created` series, which would double the size of the page."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if self._vllm_labels is not None and family.name in VLLM_NAMES:
                yield _renamed(family, VLLM_NAMES[family.name], self._vllm_labels)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, in the format that the Accept header requests."""
        encode, content_type = _encoder(accept)
        if content_type not in self._pages:
            self._pages[content_type] = encode(self)
        return self._pages[content_type], content_type

    def renew(self) -> None:
        """Make the next page anew: those that are asked for until then are the same."""
        self._pages.clear()


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # parameters that it cannot read, such as version=x
        return choose_encoder("")


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
