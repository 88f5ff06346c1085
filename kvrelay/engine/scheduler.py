"""Who may enter, who runs, which blocks: one step's plan. Knows counts and blocks, no model and no sampling.

Three questions, in this order, each answered by one method:
    admit    who may enter: first come, first served; a preempted sequence before all others
    room     which blocks: each runnable sequence gets room for its step; cache is evicted, then the youngest preempted
    divide   who runs: decode rows always, then chunks up to the token budget, of several sequences
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.engine.blocks import BlockBook
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.sequence import Sequence
from kvrelay.kvcache.pool import BrokenInvariant


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. end of one sequence, computed in one step."""

    seq: Sequence
    start: int
    end: int
    samples: bool
    """Its last row is to be sampled."""

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """For the first time: the caller tells their Admitted."""
    preempted: int = 0
    stuck: Sequence | None = None
    """Can never get room, since nobody else can move either: the caller fails it."""

    @property
    def new_tokens(self) -> int:
        """Rows of the batch."""
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def only_decodes(self) -> bool:
        """One new token each."""
        return all(len(chunk) == 1 for chunk in self.chunks)


class Scheduler:
    """Holds the queue and the admitted sequences."""

    def __init__(self, config: EngineConfig, book: BlockBook, max_model_tokens: int) -> None:
        self._config = config
        self._book = book
        self._max_model_tokens = max_model_tokens
        self.waiting: deque[Sequence] = deque()
        """Preempted ones first, then by arrival."""
        self.running: list[Sequence] = []
        """Admitted and not closed, by arrival."""

    @property
    def live(self) -> int:
        """Running sequences that have not ended: one that has only keeps its blocks until it is closed."""
        return sum(not seq.verdict for seq in self.running)

    def schedule(self) -> Plan:
        """Changes queue, blocks and `scheduled` counts; the caller computes the chunks and then calls nothing else."""
        plan_admitted = self._admit()
        runnable, preempted, stuck = self._room()
        return Plan(self._divide(runnable), plan_admitted, preempted, stuck)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and releases its blocks."""
        if seq.admitted:
            self.running.remove(seq)
            self._book.release(seq)
            seq.admitted = False
        else:
            self.retire(seq)

    def retire(self, seq: Sequence) -> None:
        """Lets a sequence that has ended wait no longer; one that runs keeps its blocks."""
        if seq in self.waiting:
            self.waiting.remove(seq)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """BrokenInvariant unless each open sequence is in its one place, in its order, with sound counts."""
        everyone = list(sequences)
        running, waiting = set(self.running), set(self.waiting)
        if len(running) != len(self.running) or len(waiting) != len(self.waiting) or running & waiting:
            raise BrokenInvariant("a sequence is queued twice")
        if not (running | waiting) <= set(everyone) or self.live > self._config.max_running:
            raise BrokenInvariant("sequences run that are not open, or too many")
        if self.running != sorted(self.running, key=lambda seq: seq.arrival):
            raise BrokenInvariant("running sequences are out of order")
        for seq in everyone:
            if seq.admitted != (seq in running) or (not seq.admitted and not seq.verdict and seq not in waiting):
                raise BrokenInvariant(f"{seq.spec.sequence_id} is lost")
            if (
                seq.scheduled
                or not 0 <= seq.computed <= len(seq.ids)
                or seq.computed > len(seq.table) * seq.block_tokens
            ):
                raise BrokenInvariant(f"{seq.spec.sequence_id}: {seq.computed} tokens computed of {len(seq.ids)}")

    def _admit(self) -> list[Sequence]:
        """Moves sequences from the queue to the running ones while there is room, the queue's head first."""
        entered: list[Sequence] = []
        while self.waiting and self.live < self._config.max_running:
            seq = self.waiting[0]
            # Those that grow keep a block each, or they would soon throw out the one that enters now.
            growing = sum(other.preemptible for other in self.running)
            if not self._book.admit(seq, self._reservation(seq), spare=growing):
                break
            self.waiting.popleft()
            seq.admitted = True
            self._insert_by_arrival(seq)
            if not seq.was_admitted:
                seq.was_admitted = True
                seq.cached = min(seq.computed // seq.block_tokens, seq.prompt_blocks) * seq.block_tokens
                entered.append(seq)
        return entered

    def _reservation(self, seq: Sequence) -> int:
        """Tokens to take room for at admission."""
        spec = seq.spec
        if spec.output_budget is not None:
            tokens = max(seq.prompt_len + min(spec.output_budget, spec.sampling.max_tokens), len(seq.ids))
        elif seq.was_admitted:
            tokens = len(seq.ids) + seq.block_tokens  # or it might be thrown out again by its own next token
        else:
            tokens = max(seq.prompt_len + spec.reserve_tokens, len(seq.ids))
        return min(tokens, self._max_model_tokens)

    def _room(self) -> tuple[list[Sequence], int, Sequence | None]:
        """Grows tables for this step; returns who can run, how many were preempted, and who is stuck for good."""
        runnable: list[Sequence] = []
        stuck: list[Sequence] = []
        preempted = 0
        for seq in list(self.running):
            if not seq.admitted or not seq.pending:
                continue
            wanted = seq.computed + min(seq.pending, self._config.token_budget)
            while not self._book.grow(seq, wanted):
                victim = self._youngest_preemptible()
                if victim is None:
                    stuck.append(seq)
                    break
                self._preempt(victim)
                preempted += 1
                if victim is seq:
                    break
            else:
                runnable.append(seq)
        runnable = [seq for seq in runnable if seq.admitted]
        deadlock = bool(stuck) and len(stuck) == len(self.running)
        return runnable, preempted, stuck[-1] if deadlock else None

    def _divide(self, runnable: list[Sequence]) -> list[Chunk]:
        """Shares the token budget out: decode rows, then chunks of resumed sequences, then the others."""
        decodes = [seq for seq in runnable if seq.pending == 1]
        others = [seq for seq in runnable if seq.pending > 1]
        others.sort(
            key=lambda seq: seq.held
        )  # stable: by arrival within each kind; a client waits for the resumed ones
        left = max(self._config.token_budget - len(decodes), 1 if others else 0)
        chunks = [self._chunk(seq, 1) for seq in decodes]
        for seq in others:
            if left <= 0:
                break
            chunks.append(self._chunk(seq, min(seq.pending, left)))
            left -= seq.scheduled
            if not self._config.pack_tails:
                break
        return chunks

    def _chunk(self, seq: Sequence, tokens: int) -> Chunk:
        seq.scheduled = tokens
        end = seq.computed + tokens
        return Chunk(seq, seq.computed, end, seq.sampling_now and end == len(seq.ids))

    def _youngest_preemptible(self) -> Sequence | None:
        return next((seq for seq in reversed(self.running) if seq.preemptible), None)

    def _preempt(self, seq: Sequence) -> None:
        """Throws a sequence back to the head of the queue, older preempted ones staying before it."""
        self.remove(seq)
        place = sum(other.was_admitted and other.arrival < seq.arrival for other in self.waiting)
        self.waiting.insert(place, seq)

    def _insert_by_arrival(self, seq: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > seq.arrival:
            place -= 1
        self.running.insert(place, seq)
