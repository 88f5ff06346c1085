"""Large buffers are kept by the process that asked for it."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from kvrelay.malloc import keep_large_buffers
{call}
def use():
    view = bytearray(8 << 20)
    for page in range(0, len(view), 4096):
        view[page] = 1

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_large_buffer_is_not_faulted_in_each_time_it_is_made() -> None:
    assert faults("assert keep_large_buffers()") < faults("") / 4
