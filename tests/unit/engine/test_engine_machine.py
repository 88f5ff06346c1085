"""The engine as a state machine: anything in any order, small pools, and at the end every answer is the reference's."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvrelay.engine.events import Admitted, CaughtUp, Computed, Finished, Paused, Stopped
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import Overloaded
from kvrelay.types import FinishReason, Sampling
from tests.unit.engine.probe import BLOCK, Probe, sampling

# Few first blocks and few tails, so that prefixes are shared, at every distance from a block edge.
prompts = st.builds(
    lambda head, length, tail: (head * 4)[:length] + tail,
    st.sampled_from([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9, 8, 7]]),
    st.integers(0, 13),
    st.sampled_from([[11], [12], [11, 12, 13]]),
)
how = st.builds(
    sampling,
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([1, 2, 5, 9, 17]),
    temperature=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3, 9, 30, 31, 32, 40)]),
    min_tokens=st.sampled_from([0, 0, 3]),
)
kinds = st.sampled_from(
    [
        {},
        {"reserve_tokens": 4},
        {"output_budget": 1},
        {"output_budget": 1, "sample": False},
        {"output_budget": 6, "held": True, "await_kv": True},
        {"held": True, "await_kv": True, "reserve_tokens": 4},
        {"held": True, "await_kv": True},
        {"held": True},
        {"await_kv": True},
    ]
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        pool_blocks=st.integers(6, 14),
        token_budget=st.sampled_from([1, 3, 8, 64]),
        max_running=st.integers(1, 5),
        cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, pool_blocks: int, token_budget: int, max_running: int, cache: bool) -> None:
        self.probe = Probe(
            pool_blocks, token_budget=token_budget, max_running=max_running, max_waiting=4, prefix_cache=cache
        )
        self.names = 0
        self.loading: set[str] = set()
        self.held: set[str] = set()

    def pick(self, data: st.DataObject, among: set[str]) -> str:
        return data.draw(st.sampled_from(sorted(among)))

    @rule(prompt=prompts, how=how, kind=kinds)
    def add(self, prompt: list[int], how: Sampling, kind: dict[str, Any]) -> None:
        name = f"s{self.names}"
        if len(self.probe.known) >= self.probe.engine.config.max_running + 4:
            with pytest.raises(Overloaded):
                self.probe.engine.add(SequenceSpec(name, prompt, how, **kind))
            return
        self.names += 1
        self.probe.add(name, prompt, how, **kind)
        if kind.get("await_kv"):
            self.loading.add(name)
        if kind.get("held"):
            self.held.add(name)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.probe.step()

    @precondition(lambda self: self.admitted_loading())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = self.pick(data, self.admitted_loading())
        self.loading.remove(name)
        self.probe.commit(name)

    @precondition(lambda self: self.can_extend())
    @rule(data=st.data(), count=st.integers(0, 6), resume=st.booleans())
    def extend(self, data: st.DataObject, count: int, resume: bool) -> None:
        self.hand_over(self.pick(data, self.can_extend()), count, resume)

    @precondition(lambda self: self.probe.known)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.probe.engine.stop(self.pick(data, set(self.probe.known)))

    @precondition(lambda self: self.probe.known)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.end(self.pick(data, set(self.probe.known)), data.draw(st.integers(0, 4)))

    @rule()
    def flush(self) -> None:
        self.probe.engine.flush_cache()
        self.probe.engine.check_integrity()

    def end(self, name: str, kept: int) -> None:
        """Closes; a loading one may have got some of its blocks, and scribbles where the rest would have come."""
        if name in self.admitted_loading():
            admitted = self.probe.of(name, Admitted)[0]
            kept = max(min(kept, len(admitted.block_ids)), admitted.cached_tokens // BLOCK)
            self.probe.deliver(name, kept)
            for block in admitted.block_ids[kept:]:
                self.probe.engine.pool.write(block, 0, b"\xff" * self.probe.engine.pool.block_bytes)
        self.loading.discard(name)
        self.held.discard(name)
        self.probe.close(name, kept)

    def hand_over(self, name: str, count: int, resume: bool) -> None:
        answer = self.probe.expected(name)
        left = len(answer.ids) - len(self.probe.known[name])
        # The router hands no complete answer over, unless only its length makes it complete.
        most = left if answer.reason is FinishReason.LENGTH else left - 1
        self.probe.extend(name, max(0, min(count, most)), resume)
        if resume:
            self.held.discard(name)

    def ended(self, name: str) -> bool:
        events = self.probe.events[name]
        return self.probe.failed(name) is not None or any(isinstance(one, Finished | Stopped) for one in events)

    def admitted_loading(self) -> set[str]:
        return {name for name in self.loading if self.probe.of(name, Admitted) and not self.ended(name)}

    def can_extend(self) -> set[str]:
        return {name for name in self.held if not self.ended(name)}

    def teardown(self) -> None:
        """Whatever came before: everyone who is let go on comes to an end, and nothing is left."""
        if not hasattr(self, "probe"):
            return
        while self.probe.known:
            self.probe.run()
            for name in self.admitted_loading():
                self.loading.discard(name)
                self.probe.commit(name)
            for name in self.can_extend():
                self.hand_over(name, 2, resume=True)
            self.probe.run()
            done = [name for name in self.probe.known if self.at_rest(name)]
            assert done, "nobody moves any more"
            for name in done:
                self.check_story(name)
                self.end(name, 0)
        self.probe.engine.check_idle()

    def at_rest(self, name: str) -> bool:
        if self.ended(name) or self.probe.of(name, Paused):
            return True
        return not self.probe.specs[name].sample and bool(self.probe.of(name, CaughtUp))

    def check_story(self, name: str) -> None:
        """What events say together."""
        assert len(self.probe.of(name, Admitted)) <= 1
        computed = [one.blocks for one in self.probe.of(name, Computed)]
        assert computed == sorted(set(computed))
        if self.probe.of(name, Finished):
            assert tuple(self.probe.known[name]) == self.probe.expected(name).ids
        budget = self.probe.specs[name].output_budget
        if self.probe.of(name, Paused):
            assert budget is not None and self.probe.of(name, Paused)[0].next_index == len(self.probe.known[name])
        failure = self.probe.failed(name)
        assert failure is None or isinstance(failure.error, Overloaded)


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
