"""The nouns that every room shares. Knows no protobuf, no torch, no I/O."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Role(enum.StrEnum):
    """What a stage is for; its site is a separate setting."""

    PREFILL = "prefill"
    RELAY = "relay"
    MAIN = "main"


class Source(enum.StrEnum):
    """Which stage sampled a token."""

    PREFILL = "prefill"
    RELAY = "relay"
    MAIN = "main"


class FinishReason(enum.StrEnum):
    """Why an answer is complete."""

    EOS = "eos"
    """The model's end-of-sequence token: counted and carried in the ids, never in the text."""
    STOP_TOKEN = "stop_token"
    """One of `Sampling.stop_token_ids`: counted and carried in the ids, never in the text."""
    STOP_STRING = "stop_string"
    """Found by TextStream at the router; tokens beyond it are dropped and not counted."""
    LENGTH = "length"
    """`max_tokens`, or the model's context length."""


class Pipeline(enum.StrEnum):
    """The legs of a request, in order."""

    P_RLD_MD = "p-rld-md"
    P_MD = "p-md"
    P_RLD = "p-rld"
    MD = "md"


class HandoffMode(enum.StrEnum):
    """How eager ids pass from relay to main decode."""

    DYNAMIC = "dynamic"
    ONE_SHOT = "one-shot"
    CATCH_UP = "catch-up"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens; all fields resolved. Validated by `kvrelay.rpc.convert`, so values here are legal."""

    seed: int
    max_tokens: int
    """Of the whole answer, counted once over all stages; >= 1."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output ids."""
    presence_penalty: float = 0.0
    """Over output ids."""
    frequency_penalty: float = 0.0
    """Over output ids."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None = none; n = the chosen token's and the top n."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs from raw logits, of one output position."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Output tokens at absolute indexes first_index, first_index + 1, ..."""

    first_index: int
    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    """Empty, or one per id."""

    @property
    def next_index(self) -> int:
        """The absolute index behind the last token."""
        return self.first_index + len(self.ids)


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Everything that must agree before one stage may read another's KV."""

    weights: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    """float64, float32, bfloat16 or float16; int8: the weights are, the KV is float32."""
    rope: str
    schema_version: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: [layer, k/v, kv_head, slot, head_dim]."""
        item = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[self.kv_dtype]
        return self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * item

    @property
    def kv_dtype(self) -> str:
        """Of the pool."""
        return "float32" if self.dtype == "int8" else self.dtype

    def difference(self, other: "LayoutFingerprint") -> str | None:
        """The first field that differs, with both values; None if all agree."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A half-open range of absolute block indexes of one prompt."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class KvTarget:
    """Where a prefill stage pushes a prompt's KV."""

    instance_id: str
    address: str
    epoch: int
    transfer_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """A stage's link to one KV receiver."""

    peer: str
    goodput_bytes_per_s: float
    """Measured; 0 = nothing measured yet."""
    pending_bytes: int
    pushes: Sequence[int] = ()
    """Bytes that each push under way has left, least first: that is their order."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One load report."""

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    """Cached and evictable."""
    queued_tokens: int = 0
    """Still to be computed by prefill and extend."""
    prefill_tokens_per_s: float = 0.0
    """Of large chunks."""
    prefill_step_ms: float = 0.0
    """What a prompt takes longer than that."""
    step_ms: float = 0.0
    draining: bool = False
    links: Sequence[LinkLoad] = ()
    index_connected: bool = False
    steps: int = 0
    steps_overrun: int = 0


@dataclass(frozen=True, slots=True)
class StageDescription:
    """What a stage is."""

    instance_id: str
    epoch: int
    role: Role
    site: str
    address: str
    model: str
    tokenizer: str
    layout: LayoutFingerprint
    vocab_size: int
    max_model_tokens: int
    pool_blocks: int
    max_running: int
    eos_token_ids: tuple[int, ...]
    device: str = "cpu"
    pace: str = ""
    version: str = ""
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class CacheChange:
    """One change of a stage's prefix cache, in order; what the index announces."""

    added: bool
    block_hash: bytes = field(repr=False)
