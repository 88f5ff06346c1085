"""compose.yaml, up: what tests do to it and ask of it. Runs README's own command lines."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.containers.shell import attempt, output, run

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Stack:
    """One running topology."""

    env: dict[str, str]
    project: str
    port: int
    ran: list[str] = field(default_factory=list)
    """README's command lines that were run here."""

    @property
    def router(self) -> str:
        """As published."""
        return f"127.0.0.1:{self.port}"

    def readme(self, line: str, limit_s: float = 600.0) -> str:
        """Runs a command line of README, word for word, in the root of the project."""
        self.ran.append(line)
        return output(shlex.split(line), env=self.env, cwd=ROOT, limit_s=limit_s)

    def compose(self, *arguments: str, limit_s: float = 300.0) -> str:
        """`docker compose ...`."""
        return output(["docker", "compose", *arguments], env=self.env, cwd=ROOT, limit_s=limit_s)

    def docker(self, *arguments: str) -> str:
        """`docker ...`."""
        return output(["docker", *arguments], env=self.env)

    def container(self, service: str, number: int = 1) -> str:
        """Its name."""
        return f"{self.project}-{service}-{number}"

    def address(self, service: str, network: str) -> str:
        """IP address of a container."""
        networks = json.loads(
            self.docker("inspect", self.container(service), "-f", "{{json .NetworkSettings.Networks}}")
        )
        return str(networks[f"{self.project}_{network}"]["IPAddress"])

    def python(self, service: str, code: str) -> str:
        """What Python code prints inside a container."""
        return self.docker("exec", self.container(service), "python", "-c", code)

    def reaches(self, service: str, host: str, port: int) -> str:
        """ "yes" if a container can open a connection, else the kind of the error."""
        code = f"""
import socket
try:
    socket.create_connection(({host!r}, {port}), 3).close(); print("yes")
except OSError as error:
    print(type(error).__name__)
"""
        return self.python(service, code)

    def generate(self, prompt: str, *flags: str, limit_s: float = 120.0) -> dict[str, Any]:
        """The facts of one answer, which must be whole."""
        command = [str(BIN / "kvrelay"), "generate", prompt, "--json", "--router", self.router, *flags]
        return dict(json.loads(output(command, limit_s=limit_s)))

    def refused(self, prompt: str) -> str:
        """What is said of a request that must not be served."""
        done = attempt([str(BIN / "kvrelay"), "generate", prompt, "--json", "--router", self.router])
        assert done.returncode, done.stdout
        return done.stderr

    def grpcurl(self, method: str, data: object) -> list[dict[str, Any]]:
        """The messages of an answer."""
        name = f"kvrelay.proto.v1.RouterService/{method}"
        text = run([str(BIN / "grpcurl"), "-plaintext", "-d", json.dumps(data), self.router, name]).stdout
        decoder, found = json.JSONDecoder(), []
        while text := text.strip():
            document, end = decoder.raw_decode(text)
            found.append(document)
            text = text[end:]
        return found

    def fleet(self) -> dict[str, Any]:
        """GetFleet."""
        return self.grpcurl("GetFleet", {})[0]

    def usable(self) -> dict[str, int]:
        """How many stages of each role the router may use."""
        roles = [stage["info"]["role"] for stage in self.fleet().get("stages", []) if stage.get("usable")]
        return {role.removeprefix("ROLE_").lower(): roles.count(role) for role in roles}

    def held(self) -> dict[str, str]:
        """By stage: what keeps it from being idle."""
        fleet = self.fleet()
        busy = {"router": str(fleet["in_flight"])} if fleet.get("in_flight") else {}
        for stage in (stage for stage in fleet.get("stages", []) if stage.get("usable")):
            load = stage.get("load", {})
            idle = load.get("blocks_free", 0) + load.get("blocks_cached", 0) == load.get("blocks_total", 0)
            if load.get("running") or load.get("waiting") or not idle:
                busy[stage["info"]["instance_id"]] = str(load)
        return busy


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first id that differs."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
