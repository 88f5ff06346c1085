"""Domain errors; messages name the field and the limit. `rpc/status.py` has the one table that maps them to status."""


class KvrelayError(Exception):
    """Root of all errors that a client may see the text of."""


class InvalidRequest(KvrelayError):
    """A field of the request is out of its range. -> INVALID_ARGUMENT"""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Unsupported(KvrelayError):
    """A named feature that kvrelay does not have. -> UNIMPLEMENTED"""


class NotServed(KvrelayError):
    """The model asked for is not the one served. -> NOT_FOUND"""


class Overloaded(KvrelayError):
    """A bounded queue is full; try later. -> RESOURCE_EXHAUSTED with a retry hint"""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoStage(KvrelayError):
    """No usable stage is left for a leg. -> UNAVAILABLE, naming the leg"""


class StageFailed(KvrelayError):
    """A stage died or broke its contract while serving. -> UNAVAILABLE"""


class LayoutMismatch(KvrelayError):
    """Two stages disagree about KV layout. -> FAILED_PRECONDITION with both values"""


class ProtocolViolation(KvrelayError):
    """A message that the state forbids (wrong next index, unknown transfer, old epoch). -> FAILED_PRECONDITION"""


class TransferEnded(KvrelayError):
    """The receiver will not take more of a transfer. Not an error of the sender. -> CANCELLED"""


class DeadlineExceeded(KvrelayError):
    """A wait with a limit ran out; the message names the wait. -> DEADLINE_EXCEEDED"""


class ModelFileError(KvrelayError):
    """A model file is missing, corrupt or not supported; names file and cause. The program does not start."""
