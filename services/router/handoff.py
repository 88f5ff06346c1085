"""Every event that one request's legs can bring, and what must be done then. No I/O, no clock; decisions: fence.py."""

from collections.abc import Sequence

from kvrelay.errors import KvrelayError, StageFailed
from kvrelay.types import FinishReason, Role, Source, TokenRun
from services.router.actions import Action, Count, Fail, Feed, Mark, Replan, Wait
from services.router.fence import Fence, Leg

SOURCE_OF = {Role.RELAY: Source.RELAY, Role.MAIN: Source.MAIN}


class Handoff(Fence):
    """One request's legs after they were opened. Every method takes one event and returns what must be done."""

    # --- opening -----------------------------------------------------------------------------------------------------

    def open(self, legs: Sequence[tuple[int, Role]], *, local_prefill: bool = False) -> list[Action]:
        """The legs of the route were opened. With local_prefill main decode samples index 0 itself."""
        for number, role in legs:
            self._attach(Leg(number, role))
        self.shown = not self.rules.hold_first
        if local_prefill and self.main is not None:
            self._resume(self.main)
        return self._done()

    def fed(self, role: Role, number: int) -> list[Action]:
        """A Feed was carried out: this leg takes the role."""
        leg = Leg(number, role)
        self._unfed.discard(role)
        self._attach(leg)
        if self.answer.count and self.speaker is None:
            self._resume(leg)
        return self._done()

    def unfed(self, role: Role, error: KvrelayError) -> list[Action]:
        """A Feed found no stage: go on with what is left, or fail."""
        self._unfed.add(role)
        self._out.append(Count(f"{role}_unavailable"))
        other = self.main if role is Role.RELAY else self.relay
        if other is None:
            self._feed_other(role, error)
        elif self.answer.count and self.speaker is None:
            self._resume(other)
        elif other.paused:
            self._out.append(Wait(error))
        return self._done()

    def gave_up(self, error: KvrelayError) -> list[Action]:
        """The time of a Wait is over."""
        if not self.answer.finished and self.main is None and self.relay is not None and self.relay.paused:
            self._out.append(Fail(error))
        return self._done()

    def stage_joined(self) -> list[Action]:
        """The fleet has changed: a leg that could not be fed may be fed now."""
        if Role.MAIN in self._unfed and self.main is None and self.relay is not None and not self.answer.finished:
            self._unfed.discard(Role.MAIN)
            self._out.append(Feed(Role.MAIN, "main_joined"))
        return self._done()

    # --- prefill -----------------------------------------------------------------------------------------------------

    def first_token(self, run: TokenRun) -> list[Action]:
        """P has sampled index 0."""
        if self.answer.count:
            self._out.append(Count("prefill_violation"))
            return self._done()
        try:
            self.answer.take(run, Source.PREFILL)
        except StageFailed as error:
            self._out.append(Replan(error))
            return self._done()
        if self.answer.finished:
            self._end()
        else:
            self._choose_speaker()
        return self._done()

    def prefill_finished(self, reason: FinishReason, completion_tokens: int) -> list[Action]:
        """P says that the answer ended with index 0."""
        if self.answer.finished or self.answer.count != 1 or self.answer.by_source[Source.PREFILL] != 1:
            return self._done()
        try:
            self.answer.end(reason, completion_tokens)
        except StageFailed as error:
            self._out.append(Fail(error))
            return self._done()
        self._end()
        return self._done()

    def kv_lost(self, number: int, error: KvrelayError) -> list[Action]:
        """The push to this leg ended without commit, though the leg lives."""
        leg = self._leg(number)
        if leg is not None and not leg.ready:
            self._lose(leg, error, "push_failed", replan=False)
        return self._done()

    def prefill_lost(self, fed: Sequence[int], error: KvrelayError) -> list[Action]:
        """The prefill stream that fed these legs broke."""
        if self.answer.count == 0:
            self._out.append(Replan(error))
            return self._done()
        for leg in [leg for leg in (self.relay, self.main) if leg and leg.number in fed and not leg.ready]:
            self._lose(leg, error, "prefill_lost")
        return self._done()

    # --- decode legs -------------------------------------------------------------------------------------------------

    def ready(self, number: int) -> list[Action]:
        """KV of the prompt is complete at the leg."""
        leg = self._leg(number)
        if leg is None or self.answer.finished:
            return self._done()
        leg.ready = True
        self._out.append(Mark(f"{leg.role}_ready"))
        self.shown = self.shown or leg.resumed
        if leg is self.main and self.answer.count and not leg.resumed:
            self._turn_to(leg)
        return self._done()

    def extended(self, number: int, next_index: int) -> list[Action]:
        """Main decode has caught up with an Extend."""
        leg = self._leg(number)
        if leg is None or self.answer.finished or leg.resumed:
            return self._done()
        if next_index != leg.known or not leg.extending:
            self._lose(leg, StageFailed(f"{leg.role} decode extended to {next_index}, not {leg.known}"), "violation")
            return self._done()
        leg.extending = False
        self._turn_to(leg)
        return self._done()

    def tokens(self, number: int, run: TokenRun) -> list[Action]:
        """A leg has sampled; counts only if it is the speaker."""
        leg = self._leg(number)
        taken = 0
        relay = number in self._fenced or (leg is not None and leg.role is Role.RELAY)
        if leg is not None and number == self.speaker and not self.answer.finished:
            try:
                taken = self.answer.take(run, SOURCE_OF[leg.role])
            except StageFailed as error:
                self._lose(leg, error, "violation")
                return self._done()
            leg.known = self.answer.count
            leg.emitted += taken
            if self.answer.reason is not None:
                self._end()
            elif self._turning and self.main is not None:
                self._relay_to(self.main)
        if relay:
            self.report.relay_dropped += len(run.ids) - taken
        return self._done()

    def paused(self, number: int) -> list[Action]:
        """The relay's budget is used up: it waits for main decode."""
        leg = self._leg(number)
        if leg is None or number != self.speaker or self.answer.finished:
            return self._done()
        leg.paused = True
        self._out.extend((Count("relay_paused"), Mark("relay_paused")))
        if self._turning and self.main is not None:
            self._relay_to(self.main)
        if self.main is None:
            self._out.append(Feed(Role.MAIN, "relay_paused"))
        return self._done()

    def stopped(self, number: int) -> list[Action]:
        """The leg has obeyed Stop; its stream ends. Only legs behind the fence are told to."""
        leg = self._leg(number)
        if leg is not None:
            self._lose(leg, StageFailed(f"{leg.role} decode stopped unasked"), "violation")
        return self._done()

    def finished(self, number: int, reason: FinishReason, completion_tokens: int) -> list[Action]:
        """The leg says that the answer is complete; also a valid answer to Stop, and then of no meaning."""
        leg = self._leg(number)
        if leg is None:
            return self._done()
        try:
            if number != self.speaker:
                raise StageFailed(f"{leg.role} decode finished unasked")
            self.answer.end(reason, completion_tokens)
        except StageFailed as error:
            self._lose(leg, error, "violation")
            return self._done()
        if not self._ended:
            self._end()
        self._forget(leg)
        return self._done()

    def drained(self, number: int) -> list[Action]:
        """Main decode has prompt and answer in its cache."""
        leg = self._leg(number)
        if leg is not None and not self.answer.finished:
            self._lose(leg, StageFailed(f"{leg.role} decode drained unasked"), "violation")
        elif leg is not None:
            self._out.append(Mark("drained"))
            self._forget(leg)
        return self._done()

    def leg_lost(self, number: int, error: KvrelayError) -> list[Action]:
        """The leg's stream broke, or ended without a terminal event."""
        leg = self._leg(number)
        if leg is not None:
            self._lose(leg, error, "lost")
        return self._done()

    def turn_due(self, number: int) -> list[Action]:
        """The relay has sent no token for a while since an AwaitToken."""
        if self._turning and number == self.speaker and self.main is not None and not self.answer.finished:
            self._relay_to(self.main)
        return self._done()

    def relay_late(self, number: int) -> list[Action]:
        """relay_ready_s have passed since the relay was resumed."""
        leg = self._leg(number)
        if leg is not None and not leg.ready and not leg.emitted and number == self.speaker:
            self._lose(leg, StageFailed("relay decode had no KV in time"), "late")
        return self._done()
