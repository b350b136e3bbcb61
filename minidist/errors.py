"""What can go wrong between ranks. (What a caller can get wrong at one rank is a ValueError.)"""


class CommError(RuntimeError):
    """A failure of communication between ranks; the base of those below."""


class CollectiveMismatch(CommError):
    """Ranks of one group did not call the same collective with agreeing arguments."""


class Deadlock(CommError):
    """Ranks wait for messages that nobody will send."""


class CommTimeout(CommError):
    """A run was not done within its `timeout`; shows what each rank was waiting for."""


class RankFailed(CommError):
    """The worker raised on a rank: `.rank`, and the remote exception as `__cause__`."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class RankDied(CommError):
    """A rank's process ended without a report: `.rank`, `.exitcode` (negative: the signal)."""

    def __init__(self, message: str, rank: int | None = None, exitcode: int | None = None):
        super().__init__(message)
        self.rank, self.exitcode = rank, exitcode
