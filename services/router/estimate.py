"""How long a prefill and a crossing will take, from load reports and priors. Pure; decides nothing."""

from collections.abc import Collection
from dataclasses import dataclass

from kvrelay.types import LinkLoad
from services.router.route import Limits, Question, StageView


@dataclass(frozen=True, slots=True)
class Crossing:
    """KV from one prefill stage to one decode stage."""

    tokens: int
    """Prompt tokens that the receiver lacks."""
    bytes: int
    """Of whole blocks that must cross."""
    ms: float
    """From now until the last block is there, if the link began at once."""
    ttft_ms: float
    """From now until prefill samples index 0."""

    @property
    def stall_ms(self) -> float:
        """KV's arrival minus the time of the first token; a decode stage beside it would wait this long."""
        return max(0.0, self.ms - self.ttft_ms)


def usable_hit(question: Question, stage: StageView, *, samples: bool) -> int:
    """Cached tokens that the stage can use, in whole blocks; one that samples index 0 must compute something."""
    description = stage.description
    hit = question.hits.get(description.instance_id)
    if not hit:
        return 0
    most = question.prompt_tokens - samples
    return (most if hit > most else hit) // description.layout.block_tokens * description.layout.block_tokens


def prefill_ms(question: Question, stage: StageView, limits: Limits) -> float:
    """Until index 0 is sampled: what is queued, what was sent since, and what this prompt lacks."""
    rate = _prefill_rate(stage, limits)
    todo = question.prompt_tokens
    if stage.description.instance_id in question.hits:
        todo -= usable_hit(question, stage, samples=True)
    return _before_ms(stage, rate) + 1e3 * todo / rate


def _before_ms(stage: StageView, rate: float) -> float:
    """Until something of a prompt sent now is computed: what is before it, and what a step costs whatever is in it."""
    load = stage.load
    if load is None:
        return 1e3 * stage.sent_tokens / rate
    return load.prefill_step_ms + 1e3 * (load.queued_tokens + stage.sent_tokens) / rate


def _prefill_rate(stage: StageView, limits: Limits) -> float:
    measured = stage.load.prefill_tokens_per_s if stage.load is not None else 0.0
    return measured if measured > 0 else limits.prefill_tokens_per_s


def itl_ms(stage: StageView, limits: Limits) -> float:
    """The decode step of a stage."""
    return stage.load.step_ms if stage.load is not None and stage.load.step_ms > 0 else limits.itl_ms


def link(sender: StageView, receiver: StageView) -> LinkLoad | None:
    """What the sender has measured of its link to the receiver."""
    peer = receiver.description.instance_id
    for one in sender.load.links if sender.load is not None else ():
        if one.peer == peer:
            return one
    return None


def goodput(stages: Collection[StageView], sender: StageView, receiver: StageView, limits: Limits) -> float:
    """Bytes/s of the link: measured by the sender, or by anyone between these sites (the mean), or the prior."""
    return _rate(link(sender, receiver), stages, sender, receiver, limits)


def _rate(
    measured: LinkLoad | None, stages: Collection[StageView], sender: StageView, receiver: StageView, limits: Limits
) -> float:
    if measured is not None and measured.goodput_bytes_per_s > 0:
        return measured.goodput_bytes_per_s
    here, there = sender.description.site, receiver.description.site
    peers = {stage.description.instance_id for stage in stages if stage.description.site == there}
    others = [
        one.goodput_bytes_per_s
        for stage in stages
        if stage.load is not None and stage.load.links and stage.description.site == here
        for one in stage.load.links
        if one.goodput_bytes_per_s > 0 and one.peer in peers
    ]
    if others:
        return sum(others) / len(others)
    return limits.lan_rate_bytes_per_s if here == there else limits.wan_rate_bytes_per_s


def crossing_bytes(question: Question, receiver: StageView) -> int:
    """Of the whole blocks that the receiver lacks."""
    return _lacked(question, receiver) * receiver.description.layout.block_bytes


def _lacked(question: Question, stage: StageView) -> int:
    """Whole blocks of the prompt."""
    block = stage.description.layout.block_tokens
    return question.prompt_tokens // block - usable_hit(question, stage, samples=False) // block


def crossing(question: Question, sender: StageView, receiver: StageView, limits: Limits) -> Crossing:
    """What must cross, and when it and the first token will be there.

    What prefill holds crosses as soon as the link is free; the rest once its computing has begun, while later blocks
    are computed; the last block not before it has been.
    """
    block_bytes = receiver.description.layout.block_bytes
    hit = usable_hit(question, receiver, samples=False)
    size = _lacked(question, receiver) * block_bytes
    fresh = min(size, _lacked(question, sender) * block_bytes)
    ttft = prefill_ms(question, sender, limits)
    arrival = 0.0
    if size:
        measured = link(sender, receiver)
        rate = _rate(measured, question.stages, sender, receiver, limits)
        near = sender.description.site == receiver.description.site
        delay = limits.lan_delay_ms if near else limits.wan_delay_ms
        free = 1e3 * (_ahead(measured, sender, receiver, size) + size - fresh) / rate
        begins = _before_ms(sender, _prefill_rate(sender, limits)) if fresh else 0.0
        line = max(free, begins) + 1e3 * fresh / rate
        last = ttft + 1e3 * block_bytes / rate
        arrival = max(line, last) + 2 * delay  # Offer -> Missing, then the last frame
    return Crossing(question.prompt_tokens - hit, size, arrival, ttft)


def _ahead(measured: LinkLoad | None, sender: StageView, receiver: StageView, size: int) -> int:
    """Bytes that cross before a push of `size` does: a link serves the push with the least left."""
    pushes = [*measured.pushes] if measured is not None else []
    pushes += [sent for peer, sent in sender.sent_crossings if peer == receiver.instance_id]
    return sum(left for left in pushes if left <= size)
