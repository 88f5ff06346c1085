"""Ties a program's life to its parent's, then becomes that program. Knows only the standard library: ~15 ms.

Run as `python -I -S child.py PARENT_PID PROGRAM ARG...`. The kernel is asked (prctl PR_SET_PDEATHSIG, kept over exec)
to send SIGKILL to this process when the parent dies, however it dies: a `kill -9` of `kvrelay up` leaves nothing.
The kernel counts the death of the parent *thread* that forked, so children are started from the main thread. Where
there is no prctl (not Linux) the program just runs, and only an orderly end of the parent ends it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ORPHANED = 75
"""Exit code when the parent was gone before the request to the kernel was made (EX_TEMPFAIL)."""


def die_with(parent: int) -> bool:
    """From here on, SIGKILL when the parent dies; False when it is dead already."""
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def main(argv: list[str]) -> int:
    """Becomes argv[2:], or says why it does not."""
    if not die_with(int(argv[1])):
        return ORPHANED
    try:
        os.execvp(argv[2], argv[2:])
    except OSError as error:
        sys.stderr.write(f"{argv[2]}: {error.strerror}\n")
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
