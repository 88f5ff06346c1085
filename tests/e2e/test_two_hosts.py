"""The guide in docs/, followed: two hosts (network namespaces joined by a veth), each a datacenter; an own model; a
firewall that opens only the guide's ports; no emulator between them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvrelay.engine.reference import generate_reference
from kvrelay.model.weights import load_model
from kvrelay.types import Sampling
from tests.containers.shell import attempt, output, run
from tests.unit.model import checkpoints
from tests.unit.text import test_huggingface as texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KVRELAY = str(Path(sys.executable).with_name("kvrelay"))
NEAR, FAR = "10.97.0.1", "10.97.0.2"
PORTS = {"a": (6379,), "b": (50051, 50061)}
"""What each host lets the other one in by: the prefix index; the main stage, and its bulk KV connections."""
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two network namespaces: "a" with NEAR, "b" with FAR."""

    names: dict[str, str]

    def at(self, site: str, *command: str) -> list[str]:
        """The command line that runs there."""
        return ["ip", "netns", "exec", self.names[site], *command]

    def cable(self, state: str) -> None:
        """ "up" or "down"."""
        run(["ip", "-n", self.names["a"], "link", "set", "wan", state])


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("iptables")):
        pytest.skip("network namespaces need root, iproute2 and iptables")
    two = Hosts({site: f"kvrelay-{os.getpid()}-{site}" for site in ("a", "b")})
    with contextlib.ExitStack() as undo:
        for name in two.names.values():
            made = attempt(["ip", "netns", "add", name])
            if made.returncode:
                pytest.skip(f"no network namespaces on this machine: {made.stderr.strip()}")
            undo.callback(attempt, ["ip", "netns", "del", name])
        ends = [part for site in ("a", "b") for part in ("name", "wan", "netns", two.names[site])]
        run(["ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:]])
        for site, address in (("a", NEAR), ("b", FAR)):
            name = two.names[site]
            # A thin cable, where the kernel has token buckets: KV comes to B later than to the relay.
            bucket = ("rate", "20mbit", "burst", "16kb", "latency", "400ms")
            attempt(["tc", "-n", name, "qdisc", "add", "dev", "wan", "root", "tbf", *bucket])
            run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", "wan"])
            for device in ("lo", "wan"):
                run(["ip", "-n", name, "link", "set", device, "up"])
            firewall = ("-A INPUT -i lo -j ACCEPT", "-A INPUT -m state --state ESTABLISHED -j ACCEPT")
            doors = (f"-A INPUT -p tcp --dport {port} -j ACCEPT" for port in PORTS[site])
            for rule in (*firewall, *doors, "-P INPUT DROP"):
                run(two.at(site, "iptables", *rule.split()))
        yield two


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory as someone may bring it: random weights, a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    texts.save(directory, texts.byte_level())
    overrides = {"vocab_size": 261, "max_position_embeddings": 2048, "eos_token_id": 259, "initializer_range": 0.3}
    return checkpoints.save(checkpoints.reference("llama", **overrides), directory)


@contextlib.contextmanager
def program(command: list[str], log: Path) -> Iterator[None]:
    """Runs until the block ends; then it must end by SIGTERM, without help."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def eventually(happens: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < until, what
        time.sleep(0.3)


@pytest.fixture(scope="module")
def served(hosts: Hosts, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Every program started by itself, as the guide says; the router learns of the stages from Redis."""
    logs = tmp_path_factory.mktemp("logs")
    index = f"--redis-url=redis://{NEAR}:6379/0"
    stage = (f"--model={model}", "--dtype=float64", "--threads=1", "--pool-tokens=8192", "--pace=fixed=8", index)
    near, far = ((*stage, f"--bulk-listen={address}") for address in (f"{NEAR}:50062", f"{FAR}:50061"))
    python = (sys.executable, "-m")
    programs = {
        "redis": ("a", (KVRELAY, "redis", "--host", NEAR)),
        "prefill": ("a", (*python, "services.prefill", f"--listen={NEAR}:50051", "--site=a", *stage)),
        "relay": ("a", (*python, "services.relay_decode", f"--listen={NEAR}:50052", "--site=a", *near)),
        "main": ("b", (*python, "services.main_decode", f"--listen={FAR}:50051", "--site=b", *far)),
        "router": ("a", (*python, "services.router", f"--listen={NEAR}:50050", f"--model={model}", index)),
    }
    with contextlib.ExitStack() as running:
        for name, (site, command) in programs.items():
            running.enter_context(program(hosts.at(site, *command), logs / f"{name}.log"))
        fleet = hosts.at("a", KVRELAY, "fleet", "--router", f"{NEAR}:50050")
        try:
            eventually(lambda: attempt(fleet).stdout.count(" yes ") == 3, "the router may use all three stages")
        except AssertionError:
            tails = [f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(logs.iterdir())]
            raise AssertionError("\n".join(tails)) from None
        yield hosts


def expected(model: Path, prompt: list[int], tokens: int) -> list[int]:
    """What one engine answers."""
    torch.set_num_threads(1)
    loaded = load_model(str(model), dtype="float64", block_tokens=16)
    sampling = Sampling(seed=5, max_tokens=tokens, ignore_eos=True)
    return list(generate_reference(loaded, prompt, sampling).ids)


def ask(hosts: Hosts, prompt: list[int], tokens: int, *flags: str) -> dict[str, object]:
    """The facts of a relayed answer."""
    ids = ",".join(map(str, prompt))
    command = (KVRELAY, "generate", ids, "--ids", "--json", "--router", f"{NEAR}:50050", "--pipeline", "p-rld-md")
    more = ("--max-tokens", str(tokens), "--seed", "5", "--ignore-eos", "--timeout", "60", *flags)
    return dict(json.loads(output(hosts.at("a", *command, *more), limit_s=90)))


def test_two_hosts_serve_a_model_of_ones_own_token_for_token(served: Hosts, model: Path) -> None:
    for attempts in range(6):  # where the cable is as fast as the relay's, its part is left out now and then
        prompt = [((7 + attempts) * i) % 250 for i in range(300)]
        answer = ask(served, prompt, 120)
        assert answer["ids"] == expected(model, prompt, 120)
        assert answer["tokens_main"] and answer["wan_bytes"]
        assert answer["tokens_relay"] or answer["fallbacks"] == ["relay_skipped"]
        if answer["tokens_relay"]:
            break
    assert answer["tokens_relay"]


def test_only_the_ports_of_the_guide_are_open(served: Hosts) -> None:
    open_ports = "import socket, sys\nfor port in map(int, sys.argv[2:]):\n" + (
        "    try:\n        socket.create_connection((sys.argv[1], port), 1).close(); print(port)\n"
        "    except OSError:\n        pass\n"
    )
    seen = output(served.at("b", sys.executable, "-c", open_ports, NEAR, "6379", "50050", "50051", "50052"))
    assert seen == "6379"


def test_a_bulk_port_that_is_closed_while_it_is_used_costs_no_token(served: Hosts, model: Path) -> None:
    """The firewall drops what comes, and says nothing: KV finds its way over gRPC."""
    shut = ["INPUT", "-p", "tcp", "--dport", str(PORTS["b"][1]), "-j", "DROP"]
    run(served.at("b", "iptables", "-I", *shut))
    try:
        prompt = [(13 * i) % 250 for i in range(300)]
        assert ask(served, prompt, 60)["ids"] == expected(model, prompt, 60)
        prompt = [(17 * i) % 250 for i in range(300)]
        answer = ask(served, prompt, 60, "--pipeline", "p-md")  # nothing comes before main decode has the KV
        assert answer["ids"] == expected(model, prompt, 60)
        assert answer["tokens_main"] and answer["wan_bytes"]
    finally:
        run(served.at("b", "iptables", "-D", *shut))


def test_a_cable_that_is_out_for_a_moment_costs_no_token(served: Hosts, model: Path) -> None:
    prompt = [(11 * i) % 250 for i in range(300)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, prompt, 400)
        fleet = served.at("a", KVRELAY, "fleet", "--router", f"{NEAR}:50050")
        eventually(lambda: "1 in flight" in attempt(fleet).stdout or answer.done(), "the request runs")
        assert not answer.done()
        served.cable("down")
        time.sleep(1.5)  # how long it is out
        served.cable("up")
        assert answer.result(90)["ids"] == expected(model, prompt, 400)
