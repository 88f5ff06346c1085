"""The stages there are: they join and leave at run time, each alone. Knows links and loads; no request."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from kvrelay.errors import NoStage
from kvrelay.types import LayoutFingerprint, Role, StageDescription, StageLoad
from services.router.discovery import Instances, addresses
from services.router.registration import TokenizerFacts, refusal
from services.router.route import StageView
from services.router.stage_link import DialSettings, StageLink, gone
from services.router.tasks import OwnedTasks

log = logging.getLogger(__name__)


class Fleet:
    """Every stage the router knows of. Open it with `open_fleet`."""

    def __init__(self, tokenizer: TokenizerFacts, dial: DialSettings) -> None:
        self._tokenizer = tokenizer
        self._dial = dial
        self._links: dict[str, StageLink] = {}
        self._tasks = OwnedTasks()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._watchers: set[Callable[[], None]] = set()
        self._restarted: list[Callable[[str], None]] = []
        self._epochs: dict[str, int] = {}
        self._shown: list[StageLink] | None = None
        """Of `views()`, in their order; None: to be found anew."""
        self._live: tuple[StageDescription, ...] | None = None
        """None: to be made anew, with what is behind each."""
        self._by_incarnation: dict[tuple[str, int], StageLink] = {}

    # --- what requests ask -------------------------------------------------------------------------------------------

    def views(self) -> tuple[StageView, ...]:
        """All stages at this moment, unusable ones with the reason; a live one hides a dead one of the same name."""
        if self._shown is None:
            self._shown = self._in_order()
        now = time.monotonic()
        return tuple([view for link in self._shown if (view := link.view(now)) is not None])

    def unreached(self) -> dict[str, str]:
        """Address -> why, of those that have never said who they are."""
        now = time.monotonic()
        return {link.address: link.why_not(now) for link in self._links.values() if link.description is None}

    def live(self) -> tuple[StageDescription, ...]:
        """Accepted stages whose load stream is open; the same object until one joins or leaves."""
        if self._live is None:
            links = [link for link in self._links.values() if link.live]
            self._live = tuple(link.description for link in links if link.description is not None)
            self._by_incarnation = {(s.instance_id, s.epoch): link for s, link in zip(self._live, links, strict=True)}
        return self._live

    def example(self) -> StageDescription:
        """Any live stage: they all agree about vocabulary, layout and end-of-sequence ids. Raises NoStage."""
        for stage in self.live():
            return stage
        whys = [f"{view.instance_id}: {view.why_not}" for view in self.views()]
        whys += [f"{address}: {why}" for address, why in self.unreached().items()]
        raise NoStage(f"no stage is registered ({'; '.join(whys) or 'none is configured'})")

    @property
    def layout(self) -> LayoutFingerprint:
        """Of all live stages. Raises NoStage."""
        return self.example().layout

    def link(self, stage: StageDescription) -> StageLink:
        """Where its streams are opened, and what was sent there is counted. StageFailed: this incarnation has left."""
        link = self._find(stage)
        if link is None:
            raise gone(f"{stage.instance_id} (epoch {stage.epoch})")
        return link

    def fresh_load(self, stage: StageDescription, at_most_s: float) -> StageLoad | None:
        """Its last report, if it is no older than that."""
        link = self._find(stage)
        return link.load if link is not None and link.load_age_s(time.monotonic()) <= at_most_s else None

    def serves(self, role: Role) -> bool:
        """Whether any stage of the role is usable."""
        return any(view.description.role is role and not view.why_not for view in self.views())

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` when a stage joins or leaves; -> what ends that."""
        self._watchers.add(changed)
        return lambda: self._watchers.discard(changed)

    def on_restart(self, forget: Callable[[str], None]) -> None:
        """Calls `forget` with the instance id when a stage comes back with another epoch: its cache is empty."""
        self._restarted.append(forget)

    # --- who belongs to it -------------------------------------------------------------------------------------------

    def add(self, address: str) -> None:
        """Dial this address until it is dropped."""
        if address not in self._links:
            link = StageLink(address, self._dial, self._admit, self._changed)
            self._links[address] = link
            self._runs[address] = self._tasks.start(link.run(), f"stage {address}")

    def drop_missing(self, known: set[str]) -> None:
        """Forget addresses that nobody names any more, unless they still serve."""
        for address in [a for a, link in self._links.items() if a not in known and not link.live]:
            self._runs.pop(address).cancel()
            del self._links[address]
            self._shown = None

    async def find(self, static: Sequence[str], instances: Instances | None) -> None:
        """One round of discovery."""
        found = await addresses(static, instances)
        if found is None:
            found = await addresses(static, None) or set()
            found |= set(self._links)
        for address in found:
            self.add(address)
        self.drop_missing(found)

    async def keep_finding(self, static: Sequence[str], instances: Instances | None, interval_s: float) -> None:
        """Rounds of discovery until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.find(static, instances)
            except OSError as error:
                log.warning("discovery: %s", error)

    async def aclose(self) -> None:
        """Hangs up on all stages."""
        await self._tasks.aclose()
        self._links.clear()
        self._live = self._shown = None

    def start_finding(self, static: Sequence[str], instances: Instances | None, interval_s: float) -> None:
        """keep_finding as a task of the fleet's own."""
        self._tasks.start(self.keep_finding(static, instances, interval_s), "discovery")

    def _find(self, stage: StageDescription) -> StageLink | None:
        self.live()
        link = self._by_incarnation.get((stage.instance_id, stage.epoch))
        # nearly always the very object: comparing all fields would cost as much as the plan
        return link if link is not None and (link.description is stage or link.description == stage) else None

    def _in_order(self) -> list[StageLink]:
        """Those that have said who they are, by name; a live one hides a dead one of the same name."""
        found: dict[str, StageLink] = {}
        for link in sorted(self._links.values(), key=lambda link: link.live):
            if link.description is not None and (link.live or link.description.instance_id not in found):
                found[link.description.instance_id] = link
        return [found[name] for name in sorted(found)]

    def _admit(self, asking: StageLink, stage: StageDescription) -> str | None:
        self._shown = None  # it has said who it is
        return refusal(stage, self._tokenizer, self._others(asking))

    def _others(self, asking: StageLink) -> Iterator[StageDescription]:
        for link in self._links.values():
            if link is not asking and link.live and link.description is not None:
                yield link.description

    def _changed(self, link: StageLink) -> None:
        self._live = self._shown = None
        stage = link.description
        if link.live and stage is not None:
            if self._epochs.get(stage.instance_id, stage.epoch) != stage.epoch:
                for forget in self._restarted:
                    forget(stage.instance_id)
            self._epochs[stage.instance_id] = stage.epoch
        for changed in list(self._watchers):
            changed()


@asynccontextmanager
async def open_fleet(
    tokenizer: TokenizerFacts,
    dial: DialSettings,
    static: Sequence[str],
    instances: Instances | None,
    resolve_interval_s: float,
) -> AsyncIterator[Fleet]:
    """A fleet that dials at once what is named now, and goes on looking. ValueError: an address is not host:port."""
    fleet = Fleet(tokenizer, dial)
    try:
        await fleet.find(static, instances)
        fleet.start_finding(static, instances, resolve_interval_s)
        yield fleet
    finally:
        await fleet.aclose()
