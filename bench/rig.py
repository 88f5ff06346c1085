"""What every system of an experiment has in common, and the four systems as topologies. Pure: starts nothing."""

from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.spec import ClusterSpec
from kvrelay.engine.pace import Pace

TOKEN_BYTES = 512
"""KV of one token of the tiny model: 2 layers x k/v x 2 heads x 8 x 8 bytes (float64)."""
BLOCK_TOKENS = 16

EMULATED = (
    "Paced engines (emulated accelerators; real maths of a tiny model) and an emulated WAN "
    "(rate and delay; no loss, no congestion control), on one host."
)

# Frozen where `python -m bench.paper --calibrate` gives pd-remote a TTFT P50 of 1.6 x pd-local's; see LOG.md.
WAN_RATE_BYTES_PER_S = 650_000.0


@dataclass(frozen=True, slots=True)
class Rig:
    """Equal for all systems of a run: declared before it."""

    pace: str = "fixed=50,token=0.1"
    wan_rate_bytes_per_s: float = WAN_RATE_BYTES_PER_S
    wan_delay_ms: float = 2.0
    """One way."""
    decode_slots: int = 16
    """In all: the baselines' one main stage has them; pdd divides them between relay and main."""
    relay_slots: int = 3
    pool_tokens: int = 65536
    stall_ms: float = 60.0
    """pdd's planner: one decode step and a half may be missed (the router's default, 200, is made for a person)."""
    local_extend_tokens: int = 8
    """The router's default is 64; as prompts are scaled, so is what is little enough for MD to compute."""

    @property
    def step_ms(self) -> float:
        """A decode step with one sequence."""
        return Pace.parse(self.pace).step_ms(1, 0, 1)

    @property
    def bound_ms(self) -> float:
        """The longest gap that a hand-off may cost: WAN round trip + 3 decode steps."""
        return 2 * self.wan_delay_ms + 3 * self.step_ms


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve."""

    name: str
    policy: str
    local: bool = False
    """Main decode stands at site A."""
    relay: bool = False
    cached: bool = True
    """Main decode has a prefix cache."""
    rate_share: float = 1.0
    """Of the run's request rate: what this system can carry."""

    def slots(self, rig: Rig) -> dict[str, int]:
        """Decode slots by kind of stage."""
        if self.relay:
            return {"relay": rig.relay_slots, "main": rig.decode_slots - rig.relay_slots}
        return {"main-local" if self.local else "main": rig.decode_slots}

    def cluster(self, rig: Rig, log_dir: Path) -> ClusterSpec:
        """The processes."""
        slots = self.slots(rig)
        main = slots.get("main", slots.get("main-local", 0))
        stage_set = [
            ("max_waiting", "256"),
            ("main.max_running", str(main)),
            ("relay.max_running", str(rig.relay_slots)),
        ]
        stage_set += [] if self.cached else [("main.prefix_cache", "false")]
        return ClusterSpec(
            model="tiny",
            prefill=1,
            relay=int(self.relay),
            main=int(not self.local),
            main_local=int(self.local),
            wan_rate=wan_rate(rig.wan_rate_bytes_per_s),
            wan_delay_ms=rig.wan_delay_ms,
            policy=self.policy,
            pace=rig.pace,
            pool_tokens=rig.pool_tokens,
            threads=1,
            router_port=0,
            router_set=(("stall_ms", f"{rig.stall_ms:g}"), ("local_extend_tokens", str(rig.local_extend_tokens))),
            stage_set=tuple(stage_set),
            log_dir=log_dir,
        )


LOCAL = System("pd-local", "pd-local", local=True)
UNCACHED = System("pd-remote-uncached", "pd-remote", cached=False, rate_share=0.2)
REMOTE = System("pd-remote", "pd-remote")
PDD = System("pdd", "pdd", relay=True)
SYSTEMS = (LOCAL, UNCACHED, REMOTE, PDD)


def wan_rate(bytes_per_s: float) -> str:
    """In the emulator's notation."""
    return f"{bytes_per_s * 8 / 1000:g}kbit"


@dataclass(frozen=True, slots=True)
class Prices:
    """Hardware cost in units of one prefill stage; decode is priced by its slots.

    The defaults are the paper's: 88 A become 43 A + 32 B, B 25 % dearer; a slot on B costs 32 x 1.25 / 45 of one on A.
    """

    prefill: float = 1.0
    decode_a: float = 1.0
    """As many decode slots as the baselines have, on chip A."""
    decode_b: float = 0.89

    def cost(self, system: System, rig: Rig) -> float:
        """Of all stages of a system."""
        unit = {"relay": self.decode_a, "main-local": self.decode_a, "main": self.decode_b}
        return self.prefill + sum(unit[kind] * n / rig.decode_slots for kind, n in system.slots(rig).items())


@dataclass(frozen=True, slots=True)
class Sla:
    """What a good answer is; the same for every system."""

    ttft_ms: float = 400.0
    ttst_ms: float = 500.0
    tpot_ms: float = 60.0
