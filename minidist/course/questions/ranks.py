"""Say what is wrong with the numbers of ranks, for the questions of several labs."""

from collections.abc import Mapping

import numpy as np

from minidist.course.question import Answer
from minidist.course.questions.arrays import apart
from minidist.tools.compare import compare

WHY = dict.fromkeys(("Y", "dX"), ": is a `return` missing?")
WHY |= {"part": ": `p.part` makes one", "d": ": it is None"}  # of what has no value


def by_rank(answer: Answer, ranks: int) -> list[dict[str, np.ndarray]]:
    """Return each rank's part of an answer whose names are "<name> <rank>"."""
    found: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]
    for key, value in answer.items():
        name, rank = key.rsplit(" ", 1)
        found[int(rank)][name] = value
    return found


def ranks_differ(
    got: list[dict], want: list[dict], causes: Mapping[float, str] | None = None
) -> str | None:
    """Compare each rank's arrays with the expected ones, by the bound of tools/compare.py.

    causes  {ratio of found to expected: the mistake that gives this ratio}
    """
    for rank, (mine, expected) in enumerate(zip(got, want, strict=True)):
        for name, value in expected.items():
            if name not in mine:
                return f"rank {rank} has no {name}{WHY.get(name.split()[0], '')}"
            if mine[name].shape != np.shape(value):
                shapes = f"{list(mine[name].shape)}, not {list(np.shape(value))}"
                return f"{name} on rank {rank} has the shape {shapes}"
            if mine[name].dtype.kind == "U":
                return f"{name} on rank {rank} is text"
        if more := sorted(mine.keys() - expected.keys()):
            return f"rank {rank} has {more[0]}, which is not its own"
        if not expected or (found := compare([mine], expected)).ok:
            continue
        g, w = mine[found.parameter], np.asarray(expected[found.parameter])
        at = np.unravel_index(np.abs(g - w).argmax(), w.shape)
        where = f", at {list(map(int, at))}," if at else ""
        said = f"{found.parameter} on rank {rank}{where} is {apart(g[at], w[at])}"
        for ratio, cause in (causes or {}).items():
            if ratio != 1 and np.allclose(g, ratio * w, rtol=1e-6, atol=1e-12):
                return f"{said}: all of it is {ratio:g} times what it should be; {cause}"
        return said
    return None


def joined(*verdicts: str | None) -> str | None:
    """Return all that was found wrong, a line each; None if nothing was."""
    return "\n".join(said for said in verdicts if said is not None) or None
