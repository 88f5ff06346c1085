"""gRPC's core told to read sockets on the thread that waits for them. Imports no gRPC, and knows no channel.

Since 1.80 grpcio has an "event engine": threads of its own read the sockets, and hand what has come to the thread that
Python's event loop waits for, so each message crosses one thread more. Without it a core relays more tokens, a fifth to
a half, and KV over gRPC costs a tenth less (`bench/LOG.md`).
"""

import os
import sys

WITHOUT_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"


def read_in_place() -> bool:
    """For the whole process; gRPC reads this when it is imported. False: it is too late, or the environment's own
    GRPC_EXPERIMENTS says otherwise.
    """
    if "grpc" in sys.modules:
        return False
    return os.environ.setdefault("GRPC_EXPERIMENTS", WITHOUT_EVENT_ENGINE) == WITHOUT_EVENT_ENGINE
