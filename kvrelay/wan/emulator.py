"""The WAN between site A and site B: two directions, the mapped ports, outages. Knows no gRPC."""

import asyncio
import enum
import resource
import time

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.rpc.address import split_address
from kvrelay.wan.direction import Direction, Shape
from kvrelay.wan.mapping import Mapping
from kvrelay.wan.relay import Connection
from kvrelay.wan.settings import WanSettings, parse_mapping, parse_ports, parse_rate

_WILDCARDS = ("0.0.0.0", "[::]", "::", "")


class Outage(enum.StrEnum):
    """What is wrong with the WAN."""

    NONE = "none"
    REFUSE = "refuse"
    """New connections are refused; open ones live."""
    STALL = "stall"
    """Bytes stop; connections stay open."""
    RESET = "reset"
    """Open connections are reset, new ones refused."""


class WanEmulator:
    """A TCP relay between the sites. Made by `wan_emulator`, which fills `admin_address`."""

    def __init__(self, settings: WanSettings) -> None:
        rate, cap = parse_rate(settings.rate), parse_rate(settings.connection_rate)
        back_rate = parse_rate(settings.rate_b_to_a) if settings.rate_b_to_a else rate
        delay = settings.delay_ms / 1000
        back_delay = delay if settings.delay_ms_b_to_a is None else settings.delay_ms_b_to_a / 1000
        jitter = settings.jitter_ms / 1000
        self.admin_address = ""
        self.a_to_b = Direction(Shape(rate, delay, jitter, cap))
        self.b_to_a = Direction(Shape(back_rate, back_delay, jitter, cap))
        self.outage = Outage.NONE
        self._settings = settings
        self._host = settings.host or split_address(settings.listen)[0]
        self._ports = parse_ports(settings.ports)
        self._mappings: dict[tuple[str, str], Mapping] = {}
        self._mapping = asyncio.Lock()
        self._connections: set[Connection] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._started = time.monotonic()
        self._cpu_before = _cpu_s()

    @property
    def connections(self) -> int:
        """Open ones, those still connecting included."""
        return len(self._connections)

    @property
    def mappings(self) -> dict[str, str]:
        """Target -> address for callers."""
        return {mapping.target: self._address(mapping) for mapping in self._mappings.values()}

    @property
    def up_s(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._started

    @property
    def cpu_s(self) -> float:
        """CPU time of the whole process since then."""
        return _cpu_s() - self._cpu_before

    async def start(self) -> None:
        """Opens the mappings of the settings, in order. OSError: a port cannot be bound."""
        for text in self._settings.map:
            await self.map_target(*parse_mapping(text))

    async def map_target(self, target: str, site: str) -> str:
        """host:port by which callers of the other site reach `target` (host:port at `site`); always the same.

        Raises InvalidRequest, or Overloaded if no port is left.
        """
        if site not in ("a", "b"):
            raise InvalidRequest("target_site", f'must be "a" or "b", got {site!r}')
        try:
            host, port = split_address(target, "target")
        except ValueError as error:
            raise InvalidRequest("target", f"must be host:port, got {target!r}") from error
        if port == 0:
            raise InvalidRequest("target", "port must be 1-65535, got 0")
        async with self._mapping:
            if (target, site) not in self._mappings:
                self._mappings[target, site] = mapping = self._take_port(target, site)
                if self.outage in (Outage.NONE, Outage.STALL):
                    await mapping.listen(lambda: self._accept(mapping, host, port))
        return self._address(self._mappings[target, site])

    async def set_outage(self, outage: Outage) -> None:
        """Begins or ends an outage, at once."""
        async with self._mapping:
            self.outage = outage
            stalled = outage is Outage.STALL
            self.a_to_b.stall(stalled)
            self.b_to_a.stall(stalled)
            (self._flowing.clear if stalled else self._flowing.set)()
            for (target, _), mapping in self._mappings.items():
                if outage in (Outage.REFUSE, Outage.RESET):
                    mapping.refuse()
                else:
                    host, port = split_address(target)
                    await mapping.listen(lambda m=mapping, h=host, p=port: self._accept(m, h, p))  # type: ignore[misc]
            if outage is Outage.RESET:
                await self._reset_all()

    async def close(self) -> None:
        """Resets every connection and gives the ports back."""
        for mapping in self._mappings.values():
            mapping.close()
        await self._reset_all()
        self.a_to_b.close()
        self.b_to_a.close()

    async def _reset_all(self) -> None:
        open_now = list(self._connections)
        for connection in open_now:
            connection.reset()
        for connection in open_now:
            await connection.closed()

    def _accept(self, mapping: Mapping, host: str, port: int) -> asyncio.BaseProtocol:
        there, back = (self.a_to_b, self.b_to_a) if mapping.site == "b" else (self.b_to_a, self.a_to_b)
        connection = Connection((host, port), there, back, self._flowing, self._connections.discard)
        self._connections.add(connection)
        return connection.caller

    def _take_port(self, target: str, site: str) -> Mapping:
        if self._ports is None:
            return Mapping(target, site, self._host, (0,))
        used = {mapping.port for mapping in self._mappings.values()}
        try:
            return Mapping(target, site, self._host, (port for port in self._ports if port not in used))
        except OSError as error:
            raise Overloaded(f"ports: none is left of {self._settings.ports} on {self._host}: {error}") from error

    def _address(self, mapping: Mapping) -> str:
        settings = self._settings
        host = settings.advertise_host_a if mapping.site == "b" else settings.advertise_host_b
        host = host or ("127.0.0.1" if self._host in _WILDCARDS else self._host)
        return f"{host}:{mapping.port}"


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
