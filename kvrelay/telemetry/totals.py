"""A registry's counters as one flat map, for those who do not scrape. Knows no metric by name."""

from prometheus_client import CollectorRegistry

_LEFT_OUT = ("_bucket", "_created")


def totals(registry: CollectorRegistry) -> dict[str, float]:
    """Every counter, and each histogram's sum and count, since the start: "hit_tokens/main" for
    `kvrelay_hit_tokens_total{role="main"}`, "handoff_stall_seconds_sum/one-shot" and so on. Zeros are left out."""
    found = {}
    for family in registry.collect():
        if family.type not in ("counter", "histogram"):
            continue
        for sample in family.samples:
            if sample.value and not sample.name.endswith(_LEFT_OUT):
                name = sample.name.removeprefix("kvrelay_").removesuffix("_total")
                found["/".join([name, *sample.labels.values()])] = sample.value
    return found
