"""One engine: step = schedule -> run -> post-process. Knows sequences and their events; no asyncio, no network.

A sequence's life: add -> waiting -> Admitted -> (loading -> commit) -> computed in chunks -> CaughtUp while held
-> extend(resume) -> Tokens -> Finished | Stopped | Paused | Failed -> close. Everything here is for one thread.
"""

import itertools
import time
from collections.abc import Callable

from kvrelay.engine.blocks import BlockBook
from kvrelay.engine.config import EngineConfig, EngineLoad
from kvrelay.engine.events import Admitted, CaughtUp, Computed, Event, Failed, Finished, Paused, Stopped, Tokens
from kvrelay.engine.finish import finish_reason
from kvrelay.engine.meter import Meter
from kvrelay.engine.pace import sleep_rest
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampler import Decision
from kvrelay.engine.scheduler import Chunk, Plan, Scheduler
from kvrelay.engine.sequence import Sequence, SequenceSpec, Verdict
from kvrelay.errors import InvalidRequest, KvrelayError, Overloaded, ProtocolViolation
from kvrelay.kvcache.pool import BrokenInvariant, KvPool
from kvrelay.model.weights import LoadedModel
from kvrelay.types import CacheChange, FinishReason, TokenRun

__all__ = ["Engine", "EngineConfig", "EngineLoad"]

Happened = list[tuple[str, Event]]
"""(sequence, event), in order."""


class Engine:
    """A model, its KV pool and the sequences that share them."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self.layout = loaded.layout
        self.pool = KvPool(loaded.layout, config.pool_blocks, loaded.model.device)
        room = config.pool_blocks * loaded.layout.block_tokens
        self.max_model_tokens = min(config.max_model_tokens or room, loaded.config.max_positions, room)
        """Prompt + output of one sequence."""
        self._vocab_size = loaded.config.vocab_size
        self._eos_token_ids = frozenset(loaded.config.eos_token_ids)
        self._book = BlockBook(self.pool, config.prefix_cache)
        self._scheduler = Scheduler(config, self._book, self.max_model_tokens)
        self._runner = Runner(loaded.model, self.pool, loaded.config.eos_token_ids)
        self._meter = Meter()
        self._arrivals = itertools.count()
        self._sequences: dict[str, Sequence] = {}
        self._outbox: Happened = []
        self._may_progress = False

    def validate(self, spec: SequenceSpec) -> None:
        """InvalidRequest if the spec could never be served. Reads only constants: any thread may call it."""
        limit = self.max_model_tokens - 1
        if not spec.prompt_ids:
            raise InvalidRequest("prompt_ids", "empty; at least 1 token is needed")
        if len(spec.prompt_ids) > limit:
            raise InvalidRequest("prompt_ids", f"{len(spec.prompt_ids)} tokens; at most {limit} (context less 1)")
        self._check_ids("prompt_ids", spec.prompt_ids)
        self._check_ids("stop_token_ids", spec.sampling.stop_token_ids)
        if spec.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{spec.sampling.max_tokens}; at least 1")
        if spec.output_budget is not None and spec.output_budget < 1:
            raise InvalidRequest("output_budget", f"{spec.output_budget}; at least 1")

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence. InvalidRequest; Overloaded: the queue is full; ProtocolViolation: the id is in use."""
        self.validate(spec)
        if spec.sequence_id in self._sequences:
            raise ProtocolViolation(f"sequence {spec.sequence_id} is open already")
        limit = self.config.max_running + self.config.max_waiting
        if len(self._sequences) >= limit:
            raise Overloaded(f"{len(self._sequences)} sequences are open; at most {limit} (max_running + max_waiting)")
        prompt_len = len(spec.prompt_ids)
        seq = Sequence(
            spec=spec,
            arrival=next(self._arrivals),
            block_tokens=self.layout.block_tokens,
            length_limit=min(spec.sampling.max_tokens, self.max_model_tokens - prompt_len),
            ids=list(spec.prompt_ids),
            held=spec.held,
            loading=spec.await_kv,
            owes_caught_up=spec.held or not spec.sample,
        )
        self._sequences[spec.sequence_id] = seq
        self._scheduler.waiting.append(seq)
        self._may_progress = True

    def commit(self, sequence_id: str, blocks: int) -> None:
        """The KV of all `blocks` whole blocks of the prompt is in the pool. ProtocolViolation if that cannot be."""
        seq = self._open(sequence_id)
        if not seq.loading or not seq.admitted:
            raise ProtocolViolation(f"sequence {sequence_id} awaits no KV")
        if blocks != seq.prompt_blocks:
            raise ProtocolViolation(f"sequence {sequence_id}: {blocks} blocks committed of {seq.prompt_blocks}")
        seq.loading = False
        seq.told_blocks = blocks
        seq.computed = blocks * seq.block_tokens
        self._book.publish(seq, seq.computed)
        self._make_samplable(seq)
        self._may_progress = True

    def extend(self, sequence_id: str, ids: list[int], first_index: int, resume: bool) -> None:
        """Gives a held sequence known output ids; resume: it is held no longer.

        ProtocolViolation: it is not held, or first_index is not its next index. InvalidRequest: ids are not in the
        vocabulary, or too many for the context. Ignored after the sequence has ended.
        """
        seq = self._open(sequence_id)
        if seq.verdict:
            return
        if not seq.held:
            raise ProtocolViolation(f"sequence {sequence_id} is sampling: it takes no ids")
        if first_index != seq.next_index:
            raise ProtocolViolation(f"sequence {sequence_id}: first_index {first_index}, next index {seq.next_index}")
        if len(seq.ids) + len(ids) > self.max_model_tokens:
            total = len(seq.ids) + len(ids)
            raise InvalidRequest("ids", f"{total} tokens with the prompt; at most {self.max_model_tokens} (context)")
        self._check_ids("ids", ids)
        seq.ids += ids
        seq.held = not resume
        seq.owes_caught_up = not resume or not seq.spec.sample
        self._make_samplable(seq)
        self._may_progress = True

    def stop(self, sequence_id: str) -> None:
        """Samples no more; Stopped follows, unless the sequence has ended. Its blocks are kept until close()."""
        seq = self._open(sequence_id)
        if not seq.verdict:
            self._end(seq, Stopped(seq.next_index))

    def fail(self, sequence_id: str, error: KvrelayError) -> bool:
        """Ends a sequence with Failed, unless it has ended. Its blocks are kept until close(). False: not open."""
        seq = self._sequences.get(sequence_id)
        if seq is not None and not seq.verdict:
            self._end(seq, Failed(error))
        return seq is not None

    def close(self, sequence_id: str, kept_blocks: int = 0) -> None:
        """Releases all that a sequence holds, at once; no event of it follows. An unknown id is ignored.

        kept_blocks: of a loading sequence, the prompt's leading blocks whose bytes have all arrived: they stay cached.
        """
        seq = self._sequences.pop(sequence_id, None)
        if seq is None:
            return
        if seq.admitted and seq.loading:
            self._book.publish(seq, min(kept_blocks, seq.prompt_blocks) * seq.block_tokens)
        self._scheduler.remove(seq)
        self._outbox = [(to, event) for to, event in self._outbox if to != sequence_id]
        self._may_progress = True

    def has_work(self) -> bool:
        """Whether a step could do anything. Only a call of this class changes False to True."""
        return self._may_progress

    def step(self, before_model: Callable[[Happened], object] | None = None) -> Happened:
        """Advances everything once and returns what happened, in order. A model's error leaves the engine unusable.

        before_model: is given what has happened when the model is about to run, and this is then not returned.
        """
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        self._welcome(plan)
        if plan.chunks:
            if before_model is not None and self._outbox:
                before_model(self._take_outbox())
            self._advance(plan.chunks, self._runner.run(plan.chunks))
            self._rest(plan, began)
        self._settle(plan)
        self._may_progress = bool(plan.chunks or plan.preempted or self._outbox)
        return self._take_outbox()

    def load(self) -> EngineLoad:
        """A snapshot."""
        waiting = self._scheduler.waiting
        return EngineLoad(
            running=self._scheduler.live,
            waiting=len(waiting),
            open=len(self._sequences),
            max_running=self.config.max_running,
            blocks_total=self.pool.blocks,
            blocks_free=self.pool.free_count,
            blocks_cached=self._book.tree.evictable,
            queued_tokens=sum(seq.pending for seq in self._sequences.values()),
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            prefill_step_ms=self._meter.prefill_step_ms,
            step_ms=self._meter.step_ms,
            steps=self._meter.steps,
            steps_overrun=self._meter.steps_overrun,
            preemptions=self._meter.preemptions,
            prompt_tokens=self._meter.prompt_tokens,
            cached_tokens=self._meter.cached_tokens,
        )

    def flush_cache(self) -> int:
        """Drops every cached block that no sequence holds; returns how many."""
        self._may_progress = True
        return self._book.flush()

    def take_cache_changes(self) -> list[CacheChange]:
        """What came into the prefix cache and left it since the last call, in order."""
        return self._book.tree.take_changes()

    def cached_hashes(self) -> list[bytes]:
        """All cached blocks, parents before children."""
        return self._book.tree.hashes()

    def check_integrity(self) -> None:
        """BrokenInvariant if blocks, locks and queues contradict each other."""
        self._scheduler.check_integrity(self._sequences.values())
        self._book.check_integrity(self._sequences.values())

    def check_idle(self) -> None:
        """check_integrity, and BrokenInvariant if any sequence is open."""
        self.check_integrity()
        if self._sequences or self._outbox:
            raise BrokenInvariant(f"open sequences: {', '.join(self._sequences) or 'none'}; {len(self._outbox)} events")

    def _welcome(self, plan: Plan) -> None:
        for seq in plan.admitted:
            seq.told_blocks = seq.cached // seq.block_tokens
            self._tell(seq, Admitted(seq.cached, seq.table[: seq.prompt_blocks]))
            self._meter.admitted(seq.prompt_len, seq.cached)
        self._meter.preemptions += plan.preempted

    def _advance(self, chunks: list[Chunk], decisions: list[Decision]) -> None:
        """Post-processing: counts, cache, tokens."""
        drawn = iter(decisions)
        for chunk in chunks:
            seq = chunk.seq
            seq.computed, seq.scheduled = chunk.end, 0
            self._book.publish(seq, seq.computed)
            blocks = min(seq.computed // seq.block_tokens, seq.prompt_blocks)
            if blocks > seq.told_blocks:
                seq.told_blocks = blocks
                self._tell(seq, Computed(blocks))
            if chunk.samples:
                self._accept(seq, next(drawn))

    def _accept(self, seq: Sequence, drawn: Decision) -> None:
        run = TokenRun(seq.next_index, (drawn.token,), (drawn.logprobs,) if drawn.logprobs else ())
        seq.ids.append(drawn.token)
        self._tell(seq, Tokens(run))
        limit, completion = seq.length_limit, seq.next_index
        reason = finish_reason(seq.spec.sampling, drawn.token, completion, limit, self._eos_token_ids)
        if reason is not None:
            self._end(seq, Finished(reason, completion))

    def _settle(self, plan: Plan) -> None:
        """Tells what follows from where each sequence stands now."""
        if plan.stuck is not None:
            self._end(plan.stuck, Failed(Overloaded("the KV pool is full of sequences that cannot be preempted")))
        for seq in self._scheduler.running:
            if seq.verdict or seq.loading or seq.pending:
                continue
            if seq.owes_caught_up:
                seq.owes_caught_up = False
                self._tell(seq, CaughtUp(seq.next_index))
            elif seq.held or not seq.spec.sample or seq.sampling_now:
                continue
            elif seq.next_index >= seq.length_limit:
                self._end(seq, Finished(FinishReason.LENGTH, seq.next_index))
            elif not seq.paused:
                seq.paused = True
                self._tell(seq, Paused(seq.next_index))

    def _rest(self, plan: Plan, began: float) -> None:
        """Makes the step last as long as its pace says, and counts it."""
        pace = self.config.pace
        context = sum(chunk.end for chunk in plan.chunks)
        least_ms = pace.step_ms(plan.new_tokens, context, len(plan.chunks))
        overran = bool(pace) and sleep_rest(least_ms, began)
        self._meter.ran(time.perf_counter() - began, plan.new_tokens, plan.only_decodes, overran)

    def _make_samplable(self, seq: Sequence) -> None:
        """A resumed sequence whose KV all came from outside lacks the row to sample from: computes it again."""
        if seq.admitted and not seq.loading and seq.sampling_now and seq.computed >= len(seq.ids):
            self._book.rewind(seq)

    def _end(self, seq: Sequence, verdict: Verdict) -> None:
        seq.verdict = verdict
        self._scheduler.retire(seq)
        self._tell(seq, verdict)
        self._may_progress = True

    def _take_outbox(self) -> Happened:
        events, self._outbox = self._outbox, []
        return events

    def _tell(self, seq: Sequence, event: Event) -> None:
        self._outbox.append((seq.spec.sequence_id, event))

    def _open(self, sequence_id: str) -> Sequence:
        seq = self._sequences.get(sequence_id)
        if seq is None:
            raise ProtocolViolation(f"no sequence {sequence_id} is open")
        return seq

    def _check_ids(self, field: str, ids: list[int] | tuple[int, ...]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(one for one in ids if not 0 <= one < self._vocab_size)
            raise InvalidRequest(field, f"token id {wrong}; ids are 0..{self._vocab_size - 1}")
