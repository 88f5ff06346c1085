"""Who may import whom, seen from what a fresh interpreter has loaded after the import."""

import json
import subprocess
import sys

import pytest


def loaded_by(module: str) -> set[str]:
    """Names of all modules in a fresh interpreter after importing `module`."""
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    ).stdout
    return set(json.loads(out))


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("services.router.app", {"torch", "kvrelay.engine", "kvrelay.model"}),
        ("kvrelay.text.tokenizer", {"torch", "grpc"}),
        ("kvrelay.kvcache.hashing", {"torch", "grpc"}),
        ("kvrelay.index.redis", {"torch"}),
        ("kvrelay.wan", {"torch"}),
        ("kvrelay.cli.main", {"torch"}),
        ("kvrelay.engine.engine", {"grpc", "redis", "kvrelay.proto.v1.common_pb2"}),
        ("kvrelay.model.transformer", {"grpc", "redis", "kvrelay.engine"}),
        ("kvrelay.kvcache.pool", {"grpc", "redis", "kvrelay.engine"}),
        ("services.main_decode.app", {"kvrelay.load", "kvrelay.cli", "services.router"}),
        ("services.prefill.app", {"kvrelay.load", "kvrelay.cli", "services.router"}),
    ],
)
def test_a_room_does_not_load_what_it_must_not_know(module: str, refused: set[str]) -> None:
    assert loaded_by(module) & refused == set()
