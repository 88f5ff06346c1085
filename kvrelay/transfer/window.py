"""How many bytes may be under way to one peer, from what its acknowledgements say. Pure: the caller tells the time."""

import math
from collections import deque
from typing import NamedTuple

MIN_WINDOW_BYTES = 512 * 1024
MAX_WINDOW_BYTES = 16 * 1024 * 1024
LEAST_QUEUE_S = 0.05
"""On a thin link the least window is only so long: a small push waits behind what is under way, whatever its turn."""
LONGEST_QUEUE_S = 2.0
"""On a very thin link the most: keep-alive pings wait behind what is under way, 5 s at most."""
PROBE_AFTER_S = 10.0
"""A round trip older than this is measured again, with nothing before it; half as old, where that happens by itself."""
GAIN = 1.25
"""Round trips that may be under way: what is more than one stands in a queue, and what is urgent behind it."""
GROWING_GAIN = 2.0
"""The same while the rate was higher by a quarter than before, within ..."""
_GROWTH_ROUND_TRIPS = 3
"""... so many round trips; as in BBR, whose start-up ends so."""
_ROUND_TRIPS = 8
"""The rate is the most of so many ..."""
_ROUND_TRIPS_S = 2.0
"""... that ended within so many seconds, and of the last two: on a link that has become slower they are long."""
LATE_S = 0.004
"""So late may an event loop be without the link running dry."""
FRAME_S = 0.002
"""A frame takes so long on its link, within its limits: what is urgent waits for one, and each has its price."""
MAX_FRAME_BYTES = 1024 * 1024
MAX_TURN_BYTES = 4 * 1024 * 1024
"""Frames that take less than `FRAME_S` go several in a turn, up to this: a large copy fills the processor's cache with
KV, and what Python does after it costs several times what it otherwise would."""
MAX_TURN_FRAMES = 256
"""Small frames cost Python rather than bytes, and others want their turn."""
_FORGET_S = 1.0
"""Busy seconds after which a slower goodput has mostly replaced a faster one."""


class Flight(NamedTuple):
    """What was known when a frame left: its acknowledgement turns it into one sample of rate and round trip."""

    size: int
    sent_at: float
    delivered: int
    """Bytes acknowledged by then."""
    delivered_at: float
    """When the last of them was, or when the link began to be busy."""
    before_sent_at: float
    """When that last one had left."""
    alone: bool
    """Nothing else was under way."""
    starved: bool
    """There was less to send than the window allowed: the sample may say too little of the link."""


class Window:
    """rate x (1.25 x least round trip + 4 ms) + 2 frames, within bounds; shared by all pushes to a peer.

    While the rate still grows, 2 round trips instead of 1.25, so that a link is found full in a few of them.

    Rate samples as in BBR (Cardwell et al., 2016): bytes delivered between a frame's leaving and its acknowledgement,
    over that time, or over the time in which they left if that was longer; samples from a link that had too little to
    send count only if they are higher. The rate is the most of the last round trips, unless they are too old, each the
    mean of its samples: as acknowledgements come in bursts, the highest sample is of more than the link can do.
    """

    def __init__(self, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.in_flight = 0
        """Bytes sent and neither acknowledged nor lost."""
        self.rate = 0.0
        """Bytes a second that the link can bear; 0 = not measured."""
        self.round_trip_s: float | None = None
        self.size = MIN_WINDOW_BYTES
        """Bytes that may be under way."""
        self._measured_at = 0.0
        self._alone_at = 0.0
        """When a frame last left with nothing before it: it will tell the round trip, whatever leaves after it."""
        self._delivered = 0
        self._delivered_at = 0.0
        self._acked_sent_at = 0.0
        """When the frame that was last acknowledged had left."""
        self._rates: deque[tuple[float, float]] = deque(maxlen=_ROUND_TRIPS)
        """Of the last round trips, and when each ended."""
        self._growing = True
        self._round_until = 0
        """This round trip ends with the first frame that leaves when so much has been delivered."""
        self._round_sum = 0.0
        """Of its samples, by weight ..."""
        self._round_bytes = 0
        """... and these."""
        self._mean = 0.0
        self._mean_s = 0.0
        """Busy seconds that `_mean` is of, older ones counting less."""
        self._starved_until = -1
        """Frames that leave before more than this was delivered come from a link that had too little to send."""

    @property
    def goodput(self) -> float:
        """Bytes a second, in the mean over the last busy seconds; 0 = not measured."""
        return self._mean

    @property
    def next_frame_bytes(self) -> int:
        """Of a push that starts now: `frame_bytes`, and up to 1 MiB on a link that is fast."""
        return max(self.frame_bytes, min(int(self.rate * FRAME_S), MAX_FRAME_BYTES))

    @property
    def turn_bytes(self) -> int:
        """What a push may send before it is asked again whose turn it is; a frame at least."""
        return max(self.next_frame_bytes, min(int(self.rate * FRAME_S), MAX_TURN_BYTES))

    @property
    def queue_s(self) -> float:
        """So long stands before the link what leaves now, if the window is full."""
        return max(0.0, self.size / self.rate - (self.round_trip_s or 0.0)) if self.rate else 0.0

    def admits(self, size: int, now: float) -> bool:
        """A frame of `size` bytes may leave now."""
        if self.in_flight == 0:
            return True
        if now - max(self._measured_at, self._alone_at) > PROBE_AFTER_S and self.round_trip_s is not None:
            return False
        return self.in_flight + size <= self.size

    def starved(self) -> None:
        """There is nothing to send though the window has room."""
        if self.in_flight < self.size:
            self._starved_until = self._delivered + self.in_flight

    def sent(self, size: int, now: float) -> Flight:
        """A frame leaves."""
        alone = self.in_flight == 0
        if alone:
            self._delivered_at = self._acked_sent_at = self._alone_at = now
        starved = self._delivered <= self._starved_until
        flight = Flight(size, now, self._delivered, self._delivered_at, self._acked_sent_at, alone, starved)
        self.in_flight += size
        return flight

    def acked(self, flight: Flight, now: float, older_bytes: int = 0) -> None:
        """A frame is acknowledged, and `older_bytes` of frames that left before it: one sample, as in BBR."""
        size = flight.size + older_bytes
        self.in_flight -= size
        self._delivered += size
        since, self._delivered_at = now - self._delivered_at, now
        self._measure_round_trip(now - flight.sent_at, flight.alone, now)
        self._acked_sent_at = max(self._acked_sent_at, flight.sent_at)
        elapsed = max(now - flight.delivered_at, flight.sent_at - flight.before_sent_at)
        if elapsed > 0:
            sample = (self._delivered - flight.delivered) / elapsed
            self._measure_goodput(sample, flight.starved, since)
            self._measure_rate(sample, flight, size, now)
        self.size = self._fitting_size()

    def lost(self, flight: Flight) -> None:
        """A frame will not be acknowledged: its lane broke."""
        self.in_flight -= flight.size

    def _fitting_size(self) -> int:
        if self.round_trip_s is None:
            return MIN_WINDOW_BYTES
        gain = GROWING_GAIN if self._growing else GAIN
        wanted = self.rate * (gain * self.round_trip_s + LATE_S) + 2 * self.next_frame_bytes
        least = min(MIN_WINDOW_BYTES, self.rate * LEAST_QUEUE_S)
        most = min(MAX_WINDOW_BYTES, max(self.frame_bytes, self.rate * LONGEST_QUEUE_S))
        return int(min(max(wanted, least), most))

    def _measure_round_trip(self, seconds: float, alone: bool, now: float) -> None:
        stale = now - self._measured_at > PROBE_AFTER_S / 2
        if self.round_trip_s is None or seconds <= self.round_trip_s or (alone and stale):
            self.round_trip_s = seconds
            self._measured_at = now

    def _measure_rate(self, sample: float, flight: Flight, size: int, now: float) -> None:
        if flight.starved and sample <= self.rate:
            return
        self._round_sum += sample * size
        self._round_bytes += size
        if flight.delivered >= self._round_until:
            self._rates.append((self._round_sum / self._round_bytes, now))
            self._round_until, self._round_sum, self._round_bytes = self._delivered, 0.0, 0
            rounds = list(self._rates)
            self.rate = max(self._counting(rounds, now))
            before = self._counting(rounds[:-_GROWTH_ROUND_TRIPS], now)
            self._growing = not before or self.rate > 1.25 * max(before)

    @staticmethod
    def _counting(rounds: list[tuple[float, float]], now: float) -> list[float]:
        """Rates of those that are not too old to count, the last two at least."""
        return [rate for n, (rate, ended) in enumerate(rounds, 2) if n >= len(rounds) or now - ended <= _ROUND_TRIPS_S]

    def _measure_goodput(self, sample: float, starved: bool, since: float) -> None:
        if since > 0 and (sample >= self._mean or not starved):
            kept = self._mean_s * math.exp(-since / _FORGET_S)
            self._mean_s = kept + since
            self._mean += (sample - self._mean) * since / self._mean_s
