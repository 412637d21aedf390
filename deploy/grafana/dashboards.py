"""The dashboards. `make dashboards` writes them as JSON files, which Grafana loads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import Panel, board
from deploy.grafana.queries import mean, quantile, rate, ratio, series, total

FOLDER = Path(__file__).with_name("dashboards")
KIND = "{{kind}}"

ACCEPTANCE_RATE = ratio("spec_accepted_tokens_total", "spec_draft_tokens_total")
ACCEPTANCE_LENGTH = f"1 + {ratio('spec_accepted_tokens_total', 'spec_drafts_total')}"
HEARTBEAT = f"time() - {series('engine_last_step_timestamp_seconds')}"
CACHE_HITS = ratio("prefix_cache_hits_total", "prefix_cache_queries_total")
WAITING = (total("requests_waiting"), "waiting")
RUNNING = (total("requests_running"), "running")


def _quantiles(title: str, name: str, help_text: str) -> Panel:
    """Return a panel with p50, p95 and p99 of a duration."""
    queries = [(quantile(q, f"{name}_seconds"), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99)]
    return Panel(title, "s", queries, help_text)


TIME_TO_FIRST = _quantiles(
    "Time to first token", "time_to_first_token", "From arrival to the first token of an output."
)
BETWEEN = _quantiles(
    "Inter-token latency",
    "inter_token_latency",
    "Between two deliveries of one output; a delivery may have several tokens.",
)
ENDED = Panel(
    "Requests ended", "reqps", [(rate("requests_total", "finish_reason"), "{{finish_reason}}")], "By reason.", "stack"
)
REJECTED = Panel(
    "Refused before the queue",
    "reqps",
    [(rate("admission_rejected_total", "reason"), "{{reason}}")],
    "By reason. queue_full is back-pressure, invalid an error of the caller.",
    "stack",
)
GAIN = Panel(
    "Gain over plain decoding",
    "none",
    [(series("spec_gain_ratio"), "{{instance}}")],
    "Estimated tokens per second in recent steps, relative to plain decoding. Below 1, drafts slow the server down.",
)
ACCEPTANCE = Panel(
    "Acceptance rate",
    "percentunit",
    [(ACCEPTANCE_RATE, "accepted / drafted")],
    "Share of drafts that were accepted; no data while nothing is drafted.",
)
TOKENS = Panel(
    "Tokens per second",
    "none",
    [(rate("generated_tokens_total"), "generated"), (rate("prompt_tokens_total"), "prompt")],
    "Tokens processed by the target, without prompt tokens from the prefix cache.",
)
PAGES = Panel("Pages in use", "percentunit", [(series("kv_usage_ratio"), "{{instance}}")], "Of the target's K/V.")
QUEUE = Panel("Requests", "none", [RUNNING, WAITING], "Running outputs, and waiting requests and outputs.", "stack")

OVERVIEW = [
    Panel("Ready", "none", [(total("engine_up"), "engines")], "Engines that can run steps.", "number", 3),
    Panel("Running", "none", [RUNNING], "Running outputs.", "number", 3),
    Panel("Waiting", "none", [WAITING], "Waiting requests and outputs.", "number", 3),
    Panel("Tokens", "none", [(rate("generated_tokens_total"), "per second")], "Generated per second.", "number", 3),
    Panel("Acceptance", "percentunit", [(ACCEPTANCE_RATE, "rate")], "Accepted / drafted tokens.", "number", 3),
    Panel("Length", "none", [(ACCEPTANCE_LENGTH, "length")], "Tokens per verified round.", "number", 3),
    Panel("Batch", "none", [(mean("batch_size", kind="verify"), "mean")], "Mean size of verification.", "number", 3),
    Panel("Since a step", "s", [(f"min({HEARTBEAT})", "idle")], "Time since the last step.", "number", 3),
    ENDED,
    QUEUE,
    TOKENS,
    TIME_TO_FIRST,
    BETWEEN,
    REJECTED,
    ACCEPTANCE,
    GAIN,
    PAGES,
]

SPECULATION = [
    ACCEPTANCE,
    Panel("Acceptance length", "none", [(ACCEPTANCE_LENGTH, "1 + accepted / rounds")], "Tokens per verified round."),
    GAIN,
    Panel(
        "Acceptance by position",
        "percentunit",
        [(ratio("spec_accepted_tokens_per_position_total", "spec_drafts_total", "position"), "draft {{position}}")],
        "Share of verified rounds that accepted the draft at this position; 0 is the first one.",
    ),
    Panel(
        "Drafts per sequence (K)",
        "none",
        [(mean("draft_tokens_per_sequence"), "mean"), (quantile(0.9, "draft_tokens_per_sequence"), "p90")],
        "Per sequence and step, including sequences without drafts.",
    ),
    Panel(
        "K",
        "none",
        [(rate("draft_tokens_per_sequence_bucket", "le"), "{{le}}")],
        "How often each number of drafts was chosen.",
        "heat",
    ),
    Panel(
        "Drafts per second",
        "none",
        [
            (rate("spec_accepted_tokens_total"), "accepted"),
            (f"{rate('spec_draft_tokens_total')} - {rate('spec_accepted_tokens_total')}", "rejected"),
        ],
        "Rejected drafts are wasted work.",
        "stack",
    ),
    Panel(
        "Mean acceptance length, by step",
        "none",
        [(rate("spec_acceptance_length_bucket", "le"), "{{le}}")],
        "One observation per step with drafts.",
        "heat",
    ),
    Panel(
        "Proposer failures",
        "none",
        [(rate("draft_failures_total"), "per second")],
        "The step continued without drafts; see the log.",
    ),
]

BATCHING = [
    Panel(
        "Mean batch size", "none", [(mean("batch_size", "kind"), KIND)], "Sequences per forward pass, by kind of work."
    ),
    Panel(
        "Batch size, p90", "none", [(quantile(0.9, "batch_size", "kind"), KIND)], "Sequences per forward pass, by kind."
    ),
    Panel(
        "Size of verification",
        "none",
        [(rate("batch_size_bucket", "le", kind="verify"), "{{le}}")],
        "Sequences per verification pass.",
        "heat",
    ),
    Panel("Mean tokens per pass", "none", [(mean("batch_tokens", "kind"), KIND)], "Tokens per forward pass, by kind."),
    Panel("Passes per second", "none", [(rate("batch_size_count", "kind"), KIND)], "Forward passes, by kind.", "stack"),
    Panel(
        "Tokens per step",
        "none",
        [
            (f"{rate('generated_tokens_total')} / ({rate('engine_steps_total')} > 0)", "generated"),
            (f"{rate('prompt_tokens_total')} / ({rate('engine_steps_total')} > 0)", "prompt"),
        ],
        "Over all sequences of the batch.",
    ),
    TOKENS,
    QUEUE,
    Panel(
        "Tokens per sequence and step",
        "none",
        [(f"{rate('generated_tokens_total')} / ({rate('batch_size_sum', kind='verify')} > 0)", "tokens")],
        "1 is plain decoding; accepted drafts increase it.",
    ),
]

SERVICE = [
    ENDED,
    REJECTED,
    QUEUE,
    Panel(
        "Queue",
        "percentunit",
        [(series("queue_usage_ratio"), "{{instance}}")],
        "Usage of the limit on requests or tokens, whichever is higher; at 100 % requests are refused.",
    ),
    _quantiles("Time in the queue", "queue_time", "From arrival to the engine."),
    TIME_TO_FIRST,
    BETWEEN,
    _quantiles("Time per output token", "time_per_output_token", "Mean of an output after its first token."),
    _quantiles("Request duration", "request_duration", "From arrival to the end."),
    _quantiles("Event loop lag", "event_loop_lag", "Delay of timers, when the event loop is blocked or has no CPU."),
    Panel(
        "Lost readers",
        "reqps",
        [(rate("client_disconnects_total"), "disconnected"), (rate("stream_stalls_total"), "stalled")],
        "Before the end of the request.",
    ),
]

ENGINE = [
    PAGES,
    Panel("Preemptions", "none", [(rate("preemptions_total"), "per second")], "Sequences preempted for lack of pages."),
    Panel("Prefix cache", "percentunit", [(CACHE_HITS, "hits")], "Share of prompt tokens found in the cache."),
    Panel(
        "Time by phase",
        "none",
        [(rate("step_duration_seconds_sum", "phase"), "{{phase}}")],
        "Seconds per second, summed over all engines; 1 is one fully used engine.",
        "stack",
    ),
    Panel(
        "Phases of a step, mean",
        "s",
        [(mean("step_duration_seconds", "phase"), "{{phase}}")],
        "propose is the draft, forward the target.",
    ),
    Panel(
        "Phases of a step, p95",
        "s",
        [(quantile(0.95, "step_duration_seconds", "phase"), "{{phase}}")],
        "propose is the draft, forward the target.",
    ),
    Panel("Steps per second", "none", [(rate("engine_steps_total"), "steps")], "Of all engines."),
    Panel("Since the last step", "s", [(HEARTBEAT, "{{instance}}")], "Grows while the engine is idle or hangs."),
    Panel("Engine up", "none", [(series("engine_up"), "{{instance}}")], "1 while it can run steps."),
    Panel("Memory", "bytes", [(series("process_resident_memory_bytes"), "{{instance}}")], "Resident, of the process."),
    Panel(
        "Cores", "none", [(rate("process_cpu_seconds_total", "instance"), "{{instance}}")], "CPU seconds per second."
    ),
    Panel("Time to ready", "s", [(series("model_load_seconds"), "{{instance}}")], "Of the last start."),
]

BOARDS: Mapping[str, tuple[str, list[Panel]]] = {
    "overview": ("Pilotfish: overview", OVERVIEW),
    "speculation": ("Pilotfish: speculation", SPECULATION),
    "batching": ("Pilotfish: batching", BATCHING),
    "service": ("Pilotfish: service", SERVICE),
    "engine": ("Pilotfish: engine", ENGINE),
}


def boards() -> dict[str, Dashboard]:
    """Return every dashboard, keyed by the name of its file."""
    return {name: board(name, title, panels) for name, (title, panels) in BOARDS.items()}


def as_json(dashboard: Dashboard) -> str:
    """Return the content of the file that Grafana loads."""
    return JSONEncoder(indent=2, sort_keys=True).encode(dashboard) + "\n"


def main() -> int:
    """Write all dashboards."""
    for name, dashboard in boards().items():
        (FOLDER / f"{name}.json").write_text(as_json(dashboard), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
