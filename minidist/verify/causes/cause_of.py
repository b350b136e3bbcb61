"""Find the cause of wrong versions of weights, and of weights that a replay does not leave.

Each function takes numbers and returns the cause in words, or None if it knows none.
"""

from collections.abc import Callable

import numpy as np

from minidist.errors import plural


def versions(
    used: list[list[tuple[str, int, int]]], should: Callable[[int, int], int] | None = None
) -> str | None:
    """Return which pass of an asynchronous pipeline used the wrong version of the weights.

    used    per stage ("F" or "B", minibatch, version), as recorded
    should  (stage, minibatch) -> version
    """
    for stage, passes in enumerate(used):
        forward = {b: version for letter, b, version in passes if letter == "F"}
        for letter, b, version in passes:
            if letter == "B" and forward.get(b, version) != version:
                return (
                    f"stage {stage}, minibatch {b}: forward with version {forward[b]}, backward "
                    f"with version {version}: the weights were not stashed"
                )
            if should is not None and version != (want := should(stage, b)):
                off = abs(version - want)
                old = "older" if version < want else "newer"
                return (
                    f"stage {stage}, minibatch {b}: {letter} with version {version}, by the "
                    f"formula {want}: {plural(off, 'update')} {old} than it should be"
                )
    return None


def replays(got: dict[str, np.ndarray], others: dict[str, Callable[[], dict]]) -> str | None:
    """Return which other training gives these weights, bit for bit.

    others  {what is different about that training: a function that replays it}
    """
    for what, replay in others.items():
        try:
            weights = replay()
        except (ValueError, KeyError, IndexError):  # nothing can have gone like this
            continue
        if all(np.array_equal(got[name], w) for name, w in weights.items()):
            return f"equals, bit for bit, a replay {what}"
    return None
