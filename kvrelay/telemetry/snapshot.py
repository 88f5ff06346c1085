"""Metrics whose values are asked for when somebody scrapes. Knows no metric by name."""

import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

log = logging.getLogger(__name__)

Labels = tuple[str, ...]


class Snapshots(Collector):
    """Gauges and counters read through callbacks. A callback that raises costs its metric one scrape, and a line.

    Callbacks run where the scrape is answered: on the event loop, if `serve_metrics` serves it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sources: dict[str, Callable[[], Iterable[Metric]]] = {}
        registry.register(self)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """One value. ValueError: the name is taken (here and below)."""
        self._add(name, lambda: [GaugeMetricFamily(name, text, value=read())])

    def counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """One value that never falls; `name` without _total."""
        self._add(name, lambda: [CounterMetricFamily(name, text, value=read())])

    def gauges(self, name: str, text: str, labels: Labels, read: Callable[[], Mapping[Labels | str, float]]) -> None:
        """One value per combination of labels; a plain str stands for a single label."""

        def collect() -> Iterable[Metric]:
            family = GaugeMetricFamily(name, text, labels=labels)
            for key, value in read().items():
                family.add_metric([key] if isinstance(key, str) else list(key), value)
            return [family]

        self._add(name, collect)

    def families(self, name: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Several metrics out of one reading; `name` is only that of the source."""
        self._add(name, collect)

    def _add(self, name: str, collect: Callable[[], Iterable[Metric]]) -> None:
        if name in self._sources:
            raise ValueError(f"metric {name} is there already")
        self._sources[name] = collect

    def describe(self) -> Iterable[Metric]:
        """Part of Collector: nothing is asked for at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Part of Collector."""
        for name, collect in list(self._sources.items()):
            try:
                families = list(collect())
            except Exception:
                log.exception("metric %s cannot be read", name)
                continue
            yield from families
