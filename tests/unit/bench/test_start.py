"""bench.start's own parts: whose process it is, its share of memory, the clock of another process."""

import os
import time

import pytest

from bench.cpu import cpu_s
from bench.start import memory_of, name_of

ROLLUP = """00400000-7ffe rollup  [rollup]
Rss:              900 kB
Pss:              400 kB
Pss_Dirty:        100 kB
Private_Clean:     50 kB
Private_Dirty:    200 kB
Anonymous:        180 kB
"""


def test_a_process_is_named_after_its_program() -> None:
    assert name_of(["/venv/bin/python", "-m", "services.main_decode", "--listen=h:1"]) == "main_decode"
    assert name_of(["/venv/bin/python", "-m", "kvrelay.wan"]) == "wan"
    assert name_of(["/opt/redis-server 127.0.0.1:7"]) == "redis-server"


def test_memory_is_the_proportional_share_what_is_private_and_what_is_anonymous() -> None:
    assert memory_of(ROLLUP) == (400 * 1024, 250 * 1024, 180 * 1024)


def test_the_clock_of_a_process_is_its_own_cpu_time() -> None:
    assert cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)
