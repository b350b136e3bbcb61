"""Find the cause of wrong sums, norms, versions, weights and bytes.

Each function takes numbers and returns the cause in words, or None if it knows none.
"""

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np

from minidist.comm.collectives import split_ends

NEAR = 1e-9


def sums(inputs: list[np.ndarray], found: list[np.ndarray]) -> str | None:
    """Return which ranks' arrays are in the wrong sums, and how many times.

    inputs  what each rank gave;  found: what each one got. Elements are compared chunk by chunk,
            as the algorithms cut them: into as many chunks as there are ranks.
    """
    N, want = len(inputs), np.sum(inputs, axis=0).reshape(-1)
    for rank, got in enumerate(found):
        ends = split_ends(want.size, N)
        for begin, stop in pairwise(ends):
            chunk = slice(begin, stop)
            if not np.allclose(got.reshape(-1)[chunk], want[chunk], NEAR, NEAR):
                parts = np.stack([x.reshape(-1)[chunk] for x in inputs])
                where = f"rank {rank}, elements {begin} to {stop - 1}"
                return f"{where}: {_terms(parts, got.reshape(-1)[chunk])}"
    return None


def _terms(parts: np.ndarray, got: np.ndarray) -> str:
    for times in product((0, 1, 2), repeat=len(parts)) if len(parts) < 7 else ():
        if np.allclose(np.tensordot(times, parts, 1), got, NEAR, NEAR):
            missing = [r for r, n in enumerate(times) if n == 0]
            twice = [r for r, n in enumerate(times) if n == 2]
            said = [f"without rank{_list(missing)}"] if missing else []
            said += [f"with rank{_list(twice)} twice"] if twice else []
            return "the sum is one " + " and ".join(said)
    return "no sum of the ranks' arrays"


def _list(ranks: list[int]) -> str:
    return ("s " if len(ranks) > 1 else " ") + ", ".join(map(str, ranks))


def norms(got: list[float], want: float) -> str | None:
    """Say why the ranks' norms differ from the norm of the whole gradient."""
    squares = np.square(got) / want**2
    if np.allclose(squares, 1, NEAR, 0):
        return None
    ratios = ", ".join(f"{ratio:.4g}" for ratio in np.sqrt(squares))
    said = f"the ranks' norms are {ratios} of one device's"
    if abs(squares.sum() - 1) <= NEAR:
        said += "; their squares add up to its square: each covers only what its rank holds"
    elif np.ptp(squares) <= NEAR and abs(squares[0] - round(squares[0])) <= NEAR:
        times = round(squares[0])
        said += f"; the squared norm is {times} times too large: "
        said += f"every element was counted {times} times"
    return said


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
                    f"formula {want}: {off} update{'s' * (off > 1)} {old} than it should be"
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


def bytes_held(found: dict[str, int], want: dict[str, int], whole: dict[str, int]) -> str | None:
    """Say what takes more memory than it should: {what: bytes} on a rank; `whole`: unsplit."""
    for what, n in found.items():
        if n != want[what]:
            said = f"{what}: {n} bytes, not {want[what]}"
            return said + ("; as much as if it were not split" if n == whole[what] else "")
    return None


def bytes_moved(found: list[int], want: list[int], operation: str) -> str | None:
    """Return which rank's bytes of an operation are wrong."""
    for rank, (n, formula) in enumerate(zip(found, want, strict=True)):
        if n != formula:
            return f"{operation}: by the ledger rank {rank} sent {n} bytes, not {formula}"
    return None
