"""host:port texts. Resolves no names."""


def split_address(text: str, what: str = "listen") -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; ValueError naming `what` if it is anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{what}: must be host:port with a port of 0-65535, got {text!r}")
    return host, int(port)


def bare_host(host: str) -> str:
    """A host as sockets want it: v6 without its brackets."""
    return host.removeprefix("[").removesuffix("]")
