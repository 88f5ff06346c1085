"""A paced main decode stage that also receives KV of a large model: one process, one event loop, as in a real stage.

The stage's own (tiny) blocks would be too small to load anything. Otherwise as bench.kv_receiver.
"""

import json
import sys

import uvloop

from bench.kv_receiver import main
from kvrelay.malloc import keep_large_buffers
from kvrelay.settings import StageSettings
from services.main_decode.app import main_decode_app


async def stage() -> None:
    """Until the control connection closes."""
    plan = json.loads(sys.argv[1])
    wanted = {"model": "tiny", "threads": 1, "pace": plan["pace"], "max_running": 16, "pool_tokens": 65536}
    settings = StageSettings(**wanted)
    async with main_decode_app(settings) as app:
        await main({"stage": app.address, "epoch": app.description.epoch})


if __name__ == "__main__":
    keep_large_buffers()
    uvloop.run(stage())
