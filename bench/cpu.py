"""CPU time of other processes, in nanoseconds: psutil's, from /proc/PID/stat, is in ticks of 10 ms. Linux only."""

import time

import psutil

_SCHEDULED = 2
"""CPUCLOCK_SCHED of the kernel: user and system time of all threads, ended ones included."""


def cpu_s(pid: int) -> float:
    """Of one process so far. OSError if there is none."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


def family_cpu_s(pid: int) -> float:
    """Of a process and all that it has started and not yet lost."""
    children = psutil.Process(pid).children(recursive=True)
    return cpu_s(pid) + sum(cpu_s(child.pid) for child in children)
