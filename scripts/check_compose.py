"""Check compose.yaml without an engine: the WAN emulator alone joins both datacenters, no service is unguarded."""

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent


def problems(compose: dict[str, Any]) -> list[str]:
    """Everything wrong with the topology; empty if all is well."""
    services: dict[str, dict[str, Any]] = compose["services"]
    nets = {name: set(service.get("networks", [])) for name, service in services.items()}
    found = [f"{name} is on no network of ours" for name, on in nets.items() if not on & {"dc-a", "dc-b"}]
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
    if nets["main"] != {"dc-b"} or nets["prefill"] != {"dc-a"} or nets["relay"] != {"dc-a"}:
        found.append("prefill and relay belong to dc-a, main to dc-b")
    return found


def main() -> int:
    """Entry point; returns the exit code."""
    found = problems(yaml.safe_load((ROOT / "compose.yaml").read_text()))
    for problem in found:
        print(f"compose.yaml: {problem}")
    print(f"compose.yaml: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
