"""What only a prefill stage is told."""

from pydantic import Field

from kvrelay.settings import StageSettings


class PrefillSettings(StageSettings):
    """Settings of a prefill stage."""

    push_connections: int = Field(4, ge=1, le=64)
    """Kept open to each KV receiver."""
    push_patience_s: float = Field(30.0, gt=0)
    """How long a KV receiver may be out of reach before a push to it fails."""
