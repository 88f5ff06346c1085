"""bench.start's own parts: whose process it is, its share of memory, the clock of another process."""

import os
import time

import pytest

from bench.cpu import cpu_s
from bench.start import memory_of, name_of, touched

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


def test_a_pool_is_the_anonymous_mapping_that_is_large_enough() -> None:
    smaps = """7f00-7f10 rw-p 00000000 00:00 0
Size:               1000 kB
Rss:                 700 kB
7f20-7f30 rw-p 00000000 00:00 0
Size:                900 kB
Rss:                 900 kB
7f40-7f50 r--s 00000000 fe:00 12 /a/file
Size:               2000 kB
Rss:                2000 kB
"""
    assert touched(smaps, 1000 * 1024) == 700 * 1024
