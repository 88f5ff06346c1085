"""One sequence: its ids, and how far it has come. Knows counts, no pool, no tree, no other sequence.

ids      [ prompt ................... | known output ids ...... ]
counts   cached <= computed <= computed + scheduled <= len(ids)
         computed: KV is in the pool; scheduled: added to it by the step under way; pending: wanted and not computed
table    [ nodes: in the tree, locked ... | private blocks .... | reserved ]
"""

from dataclasses import dataclass, field

from kvrelay.engine.events import Failed, Finished, Stopped
from kvrelay.kvcache.radix import Node
from kvrelay.types import Sampling

Verdict = Finished | Stopped | Failed


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a sequence is opened with."""

    sequence_id: str
    prompt_ids: list[int]
    sampling: Sampling
    salt: str = ""
    """Tenant salt of the block hashes."""
    await_kv: bool = False
    """KV of the prompt's whole blocks comes from outside: nothing is computed before commit()."""
    held: bool = False
    """Do not sample: compute KV of all ids but the last, then say CaughtUp, until a resume."""
    sample: bool = True
    """False: compute KV of the prompt's whole blocks, then CaughtUp, and nothing more."""
    output_budget: int | None = None
    """Sample no index at or beyond it; room for prompt + budget is reserved at admission and there is no preemption."""
    reserve_tokens: int = 0
    """Without a budget: room reserved at admission beyond the prompt."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence inside the engine. Owned by the engine's thread."""

    spec: SequenceSpec
    arrival: int
    """Order of add(); the larger, the younger."""
    block_tokens: int
    length_limit: int
    """Output tokens that max_tokens and the context allow."""
    ids: list[int] = field(default_factory=list)
    held: bool = False
    loading: bool = False
    """Its prompt's blocks may still be written from outside."""
    admitted: bool = False
    """Holds blocks."""
    was_admitted: bool = False
    """Has been told Admitted: if it waits now, it was preempted."""
    verdict: Verdict | None = None
    """How it ended; it then only waits for close()."""
    paused: bool = False
    """Has been told Paused."""
    owes_caught_up: bool = False

    cached: int = 0
    computed: int = 0
    scheduled: int = 0
    told_blocks: int = 0
    """Whole blocks of the prompt that others know to be in the pool."""

    hashes: list[bytes] = field(default_factory=list)
    """Of the first whole blocks of ids; may lag behind."""
    table: list[int] = field(default_factory=list)
    """Pool blocks, in order."""
    nodes: list[Node] = field(default_factory=list)
    """Tree nodes of the first len(nodes) entries of the table, each locked once by this sequence."""
    parked: list[int] = field(default_factory=list)
    """Blocks no longer in the table that others may still read until close()."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_ids)

    @property
    def next_index(self) -> int:
        """Output ids known = the index of the next one."""
        return len(self.ids) - self.prompt_len

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of the prompt."""
        return self.prompt_len // self.block_tokens

    @property
    def sample_limit(self) -> int:
        """No index at or beyond it is sampled."""
        budget = self.spec.output_budget
        return self.length_limit if budget is None else min(self.length_limit, budget)

    @property
    def sampling_now(self) -> bool:
        """Whether its next computed last row is to be sampled."""
        return not self.held and self.spec.sample and self.next_index < self.sample_limit

    @property
    def target(self) -> int:
        """Ids whose KV is wanted now."""
        if self.verdict or self.loading:
            return self.computed
        if not self.spec.sample:
            return self.prompt_blocks * self.block_tokens
        if self.held:
            return len(self.ids) - 1
        return len(self.ids) if self.next_index < self.sample_limit else self.computed

    @property
    def pending(self) -> int:
        """Tokens to compute now."""
        return max(0, self.target - self.computed)

    @property
    def preemptible(self) -> bool:
        """Whether its blocks may be taken and its KV computed again from its ids."""
        return (
            self.admitted
            and not (self.held or self.loading or self.verdict)
            and self.spec.sample
            and self.spec.output_budget is None
        )

    @property
    def reusable_blocks(self) -> int:
        """Cached blocks that may be used: what is sampled next must be computed, so its row must not be cached."""
        if not self.spec.sample or (self.spec.await_kv and self.loading):
            return self.prompt_blocks
        return (len(self.ids) - 1) // self.block_tokens
