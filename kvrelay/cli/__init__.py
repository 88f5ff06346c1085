"""The commands. gRPC reads two variables when it is loaded, so they are set before any command is.

Its INFO lines (a peer said goodbye, a fork was seen) are no business of a person at a terminal, and children are
started by fork and exec, which needs none of its fork handlers.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
