"""OpenTelemetry spans of requests, as part of the caller's trace (W3C trace context). Independent of the protocol.

The package is an extra and is imported only if tracing is enabled. Its own `OTEL_*` variables configure the exporter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pilotfish.engine.stats import Clock
from pilotfish.server import version
from pilotfish.server.streams.stream import OutputStream

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

EXTRA = "tracing requires OpenTelemetry: pip install 'pilotfish[otel]'"


class Tracing:
    """Starts traces: spans named `generate`, with OpenTelemetry's attributes for generative AI where they exist.

    Without a tracer nothing is recorded.
    """

    def __init__(self, tracer: Tracer | None = None, model: str = "", clock: Clock = time.monotonic) -> None:
        self._tracer, self._model, self._clock = tracer, model, clock

    @classmethod
    def configured(cls, model: str) -> Tracing:
        """Use the exporter from the environment. Raises ValueError if the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(EXTRA) from error
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "pilotfish"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider.get_tracer("pilotfish", version()), model)

    def begin(self, headers: Mapping[str, str]) -> Trace:
        """Start the trace of a request with these headers or metadata; `traceparent` refers to the caller's trace."""
        if self._tracer is None:
            return Trace(None, self._clock)
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        attributes = {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": self._model}
        return Trace(self._tracer.start_span("generate", extract(headers), SpanKind.SERVER, attributes), self._clock)


class Trace:
    """The trace of one request from its arrival. It ends once, by `refuse` or by `end`."""

    def __init__(self, span: Span | None, clock: Clock) -> None:
        self._span, self._clock = span, clock

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits; None if the trace is not recorded."""
        context = None if self._span is None else self._span.get_span_context()
        return None if context is None or not context.trace_flags.sampled else f"{context.trace_id:032x}"

    def refuse(self, error: BaseException) -> None:
        """End the trace of a request that was not admitted."""
        if self._span is not None:
            self._fail(self._span, error)
            self._span.end()

    def end(self, stream: OutputStream) -> None:
        """End the trace of a request that was admitted."""
        span = self._span
        if span is None:
            return
        ends = [output.finished for output in stream.outputs if output.finished is not None]
        attributes: dict[str, Any] = {
            "pilotfish.request_id": stream.request_id,
            "gen_ai.usage.input_tokens": len(stream.request.token_ids),
            "gen_ai.usage.output_tokens": sum(output.num_tokens for output in stream.outputs),
            "gen_ai.response.finish_reasons": [end.reason.value for end in ends],
            "pilotfish.drafted_tokens": sum(end.stats.drafted for end in ends),
            "pilotfish.accepted_tokens": sum(end.stats.accepted for end in ends),
        }
        span.set_attributes(attributes)
        first = min((o.timeline.first_token for o in stream.outputs if o.timeline.first_token), default=None)
        for name, when in (("started", stream.timeline.started), ("first token", first)):
            if when is not None:
                span.add_event(name, timestamp=time.time_ns() - round(1e9 * (self._clock() - when)))
        if stream.error is not None:
            self._fail(span, stream.error)
        span.end()

    @staticmethod
    def _fail(span: Span, error: BaseException) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("error.type", type(error).__name__)
        span.set_status(StatusCode.ERROR)  # without the message, which may contain text of the prompt
