"""Check compose.yaml and deploy/ without an engine: the WAN emulator alone joins both datacenters, no service is
unguarded, every scraped name and charted metric exists."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from kvrelay.telemetry.metrics import READ_COUNTERS, RouterMetrics, StageMetrics
from kvrelay.types import LinkLoad, StageLoad

ROOT = Path(__file__).resolve().parent.parent
SITES = {"prefill": {"dc-a"}, "relay": {"dc-a"}, "router": {"dc-a"}, "main": {"dc-b"}, "wan": {"dc-a", "dc-b"}}


def topology_problems(compose: dict[str, Any]) -> list[str]:
    """What is wrong with networks, guards and health checks."""
    services: dict[str, dict[str, Any]] = compose["services"]
    nets = {name: set(service.get("networks", [])) for name, service in services.items()}
    found = [
        f"{name} belongs to {sorted(on)}, has {sorted(nets[name])}" for name, on in SITES.items() if nets[name] != on
    ]
    found += [f"{name} is on no network of ours" for name, on in nets.items() if not on & {"dc-a", "dc-b"}]
    both = sorted(name for name, on in nets.items() if {"dc-a", "dc-b"} <= on)
    if both != ["wan"]:
        found.append(f"only `wan` may be on both networks, found {both}")
    for name, service in services.items():
        if service.get("network_mode") == "host":
            found.append(f"{name} bypasses the networks")
        if not service.get("read_only") or service.get("user", "0").startswith("0"):
            found.append(f"{name} must be non-root on a read-only file system")
        if "healthcheck" not in service:
            found.append(f"{name} has no health check")
    if sum("build" in service for service in services.values()) != 1:
        found.append("one service builds the image, the others use it")
    return found


def scrape_targets(config: dict[str, Any]) -> set[str]:
    """host:port of everything that a Prometheus of ours asks."""
    targets = set()
    for job in config["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            targets |= {f"{name}:{found['port']}" for name in found["names"]}
        for static in job.get("static_configs", []):
            targets |= set(static["targets"])
    return targets


def scrape_problems(services: dict[str, dict[str, Any]], site: str, targets: set[str]) -> list[str]:
    """Targets that are not there, or not in this Prometheus's datacenter."""
    found = []
    for target in sorted(targets):
        name = target.partition(":")[0]
        if f"dc-{site}" not in services.get(name, {}).get("networks", []):
            found.append(f"Prometheus of {site} cannot reach {target}")
    return found


def known_metrics() -> set[str]:
    """Names of all metrics, as they are exposed."""
    router, stage = RouterMetrics(), StageMetrics()
    stage.load_from(lambda: StageLoad(links=(LinkLoad("peer", 0.0, 0),)))
    for name in READ_COUNTERS:
        stage.count_from(name, lambda: 0.0)
    names = {metric.name: metric.type for one in (router, stage) for metric in one.registry.collect()}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, kind in names.items() for suffix in suffixes.get(kind, ("",))}


def dashboard_problems(dashboard: dict[str, Any]) -> list[str]:
    """Charted metrics that nothing exposes."""
    text = json.dumps([panel["targets"] for panel in dashboard["panels"]])
    return [f"the dashboard charts {name}" for name in sorted(set(re.findall(r"kvrelay_\w+", text)) - known_metrics())]


def main() -> int:
    """Entry point; returns the exit code."""
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    found = topology_problems(compose)
    for site in ("a", "b"):
        config = yaml.safe_load((ROOT / f"deploy/prometheus-{site}.yml").read_text())
        found += scrape_problems(compose["services"], site, scrape_targets(config))
    found += dashboard_problems(json.loads((ROOT / "deploy/dashboard.json").read_text()))
    for problem in found:
        print(f"compose.yaml: {problem}")
    print(f"compose.yaml and deploy/: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
