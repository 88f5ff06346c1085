"""Ports for a cluster. Knows only sockets.

Free ports are taken from below the kernel's range for outgoing connections, so that a stage which is killed and started
again finds its port still free.
"""

import errno
import random
import socket

FIRST, LAST = 20_000, 32_000


def bindable(host: str, port: int) -> bool:
    """Whether host:port can be bound now. OSError for anything but "in use"."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports that are free now. OSError if there are none."""
    draw = random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST)
    free = (port for port in draw if bindable(host, port))
    try:
        return [next(free) for _ in range(count)]
    except StopIteration:
        raise OSError(errno.EADDRNOTAVAIL, f"no {count} free ports on {host} in {FIRST}-{LAST}") from None
