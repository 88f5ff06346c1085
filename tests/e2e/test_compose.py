"""`docker compose up` for real: an engine is started, images are built where there are none; then asked, killed, cut.

One topology for all tests of this file, two main stages, left as it was found by each.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from kvrelay.engine.reference import margin_at
from kvrelay.model.weights import load_model
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.types import Sampling
from scripts.check_compose import scrape_targets
from tests.containers.base import build_base
from tests.containers.engine import engine
from tests.containers.shell import attempt, output
from tests.containers.stack import BIN, ROOT, Stack, first_difference
from tests.containers.wheels import served_wheels
from tests.readme import commands

pytestmark = [pytest.mark.container, pytest.mark.timeout(3000)]

BASE = "kvrelay-test-base:local"
PROMPT = "Write a long story about two cities that are joined by one slow road. " * 4
SAMPLING = ("--seed", "11", "--temperature", "0.8", "--ignore-eos")
NEAR_TIE = 1e-3
SETTLE_S = 180.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """README's `docker compose up`, and `down` at the end; whatever had to be started for it ends too."""
    scratch = tmp_path_factory.mktemp("docker")
    with contextlib.ExitStack() as undo:
        env = undo.enter_context(engine(scratch))
        wheels = undo.enter_context(served_wheels(sys.executable))
        project, port = f"kvrelay-test-{os.getpid()}", free_port()
        env |= {
            "COMPOSE_PROJECT_NAME": project,
            "KVRELAY_IMAGE": f"{project}:local",
            "KVRELAY_BASE": base(env, scratch),
            "KVRELAY_BUILD_NETWORK": "host",
            "KVRELAY_PIP_FIND_LINKS": wheels,
            "KVRELAY_PORT": str(port),
        }
        running = Stack(env, project, port)
        undo.callback(attempt, ["docker", "image", "rm", f"{project}:local"], env=env)
        undo.callback(attempt, ["docker", "compose", "down", "--volumes", "--timeout", "5"], env=env, cwd=ROOT)
        up, more = (line for line in commands("docker compose") if "up" in line)
        started = time.monotonic()
        bring_up(running, up)
        first = time.monotonic()
        bring_up(running, more)
        print(f"{up}: {first - started:.0f} s; {more}: {time.monotonic() - first:.0f} s")
        yield running
        running.readme(*(line for line in commands("docker compose") if "down" in line))
        assert set(running.ran) == set(commands("docker compose")), "every such line of README is run here"
        assert running.docker("ps", "--all", "--quiet", "--filter", f"name={project}") == ""


def base(env: dict[str, str], scratch: Path) -> str:
    """An image with Python: the one of the environment, the registry's, else one built here."""
    if named := os.environ.get("KVRELAY_BASE"):
        return named
    usual = "python:3.11-slim-bookworm"
    with contextlib.suppress(subprocess.TimeoutExpired):
        if not attempt(["docker", "pull", "--quiet", usual], env=env, limit_s=120).returncode:
            return usual
    if attempt(["docker", "image", "inspect", BASE], env=env).returncode:
        build_base(env, BASE, scratch)
    return BASE


def bring_up(running: Stack, line: str) -> None:
    """Runs it; if it fails, says what the containers said."""
    try:
        running.readme(line, limit_s=2400)
    except RuntimeError as error:
        logs = attempt(["docker", "compose", "logs", "--tail", "20", "--no-color"], env=running.env, cwd=ROOT).stdout
        raise AssertionError(f"{error}\n{logs[-6000:]}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(happens: Callable[[], bool], what: str) -> None:
    """Returns once it has happened; fails after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    while not happens():
        assert time.monotonic() < until, what
        time.sleep(0.5)


@pytest.fixture(autouse=True)
def whole_again(stack: Stack) -> Iterator[None]:
    """After each test all four stages are usable and hold nothing."""
    yield
    eventually(lambda: stack.usable() == {"prefill": 1, "relay": 1, "main": 2}, f"usable: {stack.usable()}")
    eventually(lambda: not stack.held(), f"held: {stack.held()}")


def same(ours: list[int], theirs: list[int], prompt: list[int], limit: int) -> bool:
    """Equal, or first different where another outcome is as near as rounding."""
    at = first_difference(ours, theirs)
    if at is None:
        return True
    sampling = Sampling(seed=11, temperature=0.8, max_tokens=limit, ignore_eos=True)
    margin = margin_at(load_model("smollm2", block_tokens=16), prompt, ours[:at], at, sampling)
    print(f"first difference at {at}, margin {margin:.2e}")
    return at < min(len(ours), len(theirs)) and margin <= NEAR_TIE


@contextlib.contextmanager
def up_on_this_host(logs: Path) -> Iterator[str]:
    """`kvrelay up`; gives the router's address."""
    router = f"127.0.0.1:{free_port()}"
    port = router.rpartition(":")[2]
    with subprocess.Popen(
        [str(BIN / "kvrelay"), "up", "--router-port", port, "--log-dir", str(logs)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            eventually(lambda: not attempt([str(BIN / "kvrelay"), "health", router]).returncode, "kvrelay up")
            yield router
        finally:
            process.terminate()


def test_tokens_through_compose_equal_those_of_kvrelay_up(stack: Stack, tmp_path: Path) -> None:
    flags = ("--max-tokens", "48", "--pipeline", "p-rld-md", *SAMPLING)
    through = stack.generate(PROMPT, *flags)
    with up_on_this_host(tmp_path) as router:
        direct = json.loads(output([str(BIN / "kvrelay"), "generate", PROMPT, "--json", "--router", router, *flags]))
    prompt = [int(token) for token in stack.grpcurl("Tokenize", {"prompt": PROMPT})[0]["ids"]]
    assert len(through["ids"]) == len(direct["ids"]) == 48
    assert same(through["ids"], direct["ids"], prompt, 48)


def test_main_decode_is_reached_over_the_emulator_only(stack: Stack) -> None:
    there = stack.address("main", "dc-b")
    assert stack.reaches("wan", there, 50051) == "yes", "the address is right"
    assert stack.reaches("prefill", "wan", 7000) == "yes", "the emulator is the way across"
    for here in ("prefill", "relay", "router"):
        assert stack.reaches(here, "main", 50051) == "gaierror"
        assert stack.reaches(here, there, 50051) == "TimeoutError"
    assert stack.reaches("main", stack.address("prefill", "dc-a"), 50051) == "TimeoutError"
    for stage in (one for one in stack.fleet()["stages"] if one["info"]["role"] == "ROLE_MAIN"):
        assert stage["info"]["address"].startswith("wan:"), "each main stage has an address of its own across the WAN"
    addresses = [stage["info"]["address"] for stage in stack.fleet()["stages"]]
    assert len(set(addresses)) == len(addresses)


def test_no_program_is_root_or_can_write_but_to_tmp(stack: Stack) -> None:
    code = """
import os
print(os.getuid(), open("/proc/self/status").read().split("CapEff:")[1].split()[0])
for place in ("/", "/opt", "/models"):
    try:
        open(place + "/x", "w"); print("wrote", place)
    except OSError:
        pass
"""
    for service in ("redis", "wan", "prefill", "relay", "main", "router"):
        assert stack.python(service, code) == "10001 0000000000000000", service


def test_grpcurl_and_load_are_served(stack: Stack) -> None:
    replies = stack.grpcurl("Generate", {"prompt": "The capital of France is", "sampling": {"max_tokens": 16}})
    assert "completed" in replies[-1]
    load = output([str(BIN / "kvrelay"), "load", "-n", "8", "-c", "2", "--router", stack.router], limit_s=300)
    assert "TTFT" in load


def test_every_scrape_target_answers_inside_its_datacenter(stack: Stack) -> None:
    """Prometheus itself needs a registry; what it would ask, and from where, does not."""
    stack.compose("--profile", "observability", "config", "--quiet")
    code = """
import socket, urllib.request
found = sorted({{info[4][0] for info in socket.getaddrinfo({host!r}, {port}, type=socket.SOCK_STREAM)}})
for address in found:
    assert b"kvrelay_" in urllib.request.urlopen(f"http://{{address}}:{port}/metrics", timeout=5).read()
print(len(found))
"""
    for site, asker in (("a", "redis"), ("b", "main")):
        config = yaml.safe_load((ROOT / f"deploy/prometheus-{site}.yml").read_text())
        for target in sorted(scrape_targets(config) - {"wan:7001"}):
            host, port = target.split(":")
            counted = stack.python(asker, code.format(host=host, port=port))
            assert counted == ("2" if host == "main" else "1"), target
    assert stack.reaches("redis", "wan", 7001) == "yes", "where datacenter B's Prometheus is asked"


@contextlib.contextmanager
def asked(stack: Stack, tokens: int) -> Iterator[Callable[[], list[int]]]:
    """A relayed request of its own cache; its first token is there when the block begins. Gives what reads the rest."""
    sampling = common_pb2.Sampling(max_tokens=tokens, seed=11, temperature=0.8, ignore_eos=True)
    request = router_pb2.GenerateRequest(
        prompt=PROMPT, sampling=sampling, pipeline=router_pb2.PIPELINE_P_RLD_MD, cache_salt=uuid.uuid4().hex
    )
    with grpc.insecure_channel(stack.router) as channel:
        replies = router_pb2_grpc.RouterServiceStub(channel).Generate(request, timeout=150)
        ids: list[int] = []
        while not ids:
            ids += next(replies).output.tokens.ids
        yield lambda: ids + [token for reply in replies for token in reply.output.tokens.ids]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> tuple[list[int], list[int]]:
    """Prompt, and answer of 120 tokens."""
    prompt = [int(token) for token in stack.grpcurl("Tokenize", {"prompt": PROMPT})[0]["ids"]]
    return prompt, stack.generate(PROMPT, "--max-tokens", "120", *SAMPLING)["ids"]


@pytest.mark.parametrize("service", ["relay", "main"])
def test_a_killed_container_costs_a_request_no_token(
    stack: Stack, undisturbed: tuple[list[int], list[int]], service: str
) -> None:
    with asked(stack, 120) as rest:
        stack.docker("kill", stack.container(service))
        try:
            ids = rest()
        finally:
            stack.docker("start", stack.container(service))
    assert same(ids, undisturbed[1], undisturbed[0], 120)


def test_a_wan_that_is_unplugged_and_plugged_in_again_costs_a_request_no_token(
    stack: Stack, undisturbed: tuple[list[int], list[int]]
) -> None:
    far = f"{stack.project}_dc-b"
    with asked(stack, 120) as rest:
        stack.docker("network", "disconnect", far, stack.container("wan"))
        try:
            time.sleep(3)  # how long the cable is out
        finally:
            stack.docker("network", "connect", "--alias", "wan", far, stack.container("wan"))
        ids = rest()
    assert same(ids, undisturbed[1], undisturbed[0], 120)


def test_without_any_main_stage_a_request_is_refused_by_name_and_served_again_later(stack: Stack) -> None:
    both = [stack.container("main", 1), stack.container("main", 2)]
    stack.docker("kill", *both)
    try:
        eventually(lambda: "main" not in stack.usable(), "the router learns of it")
        assert "UNAVAILABLE" in (said := stack.refused("hello")) and "main" in said, said
    finally:
        stack.docker("start", *both)
    eventually(lambda: stack.usable().get("main") == 2, "both are back")
    assert stack.generate("hello", "--max-tokens", "4")["ids"]
