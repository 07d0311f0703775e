"""Spans of OpenTelemetry: a run, and in it each resumption, step, evaluation and save.

Where they go, its library reads from the environment: OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_TRACES_EXPORTER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
"""

import time
from collections.abc import Mapping

from ...parallel.position import restarts
from .tracker import Tracker

_NANOSECONDS = 1_000_000_000


class Spans(Tracker):
    """Spans 'merak.run', 'merak.resume', 'merak.step', 'merak.evaluate' and 'merak.save'."""

    name = "OpenTelemetry"

    def __init__(self) -> None:
        from opentelemetry import trace

        # Without a provider of the process's own, as opentelemetry-instrument sets one.
        self._own = None
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._own = _provider()
        provider = self._own or trace.get_tracer_provider()
        self._tracer = provider.get_tracer("megatron_merak")
        self._run = self._tracer.start_span("merak.run", attributes={"merak.restarts": restarts()})
        self._inside = trace.set_span_in_context(self._run)

    def span(
        self, what: str, iteration: int, seconds: float, values: Mapping[str, float | str]
    ) -> None:
        end = time.time_ns()
        attributes = {f"merak.{name}": value for name, value in values.items()}
        span = self._tracer.start_span(
            f"merak.{what}",
            context=self._inside,
            start_time=end - int(seconds * _NANOSECONDS),
            attributes={"merak.iteration": iteration, **attributes},
        )
        span.end(end)

    def close(self) -> None:
        self._run.end()
        if self._own is not None:
            self._own.shutdown()


def _provider():
    """A provider that sends spans to where the environment says."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
