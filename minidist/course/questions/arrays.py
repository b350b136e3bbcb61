"""Compare the arrays of an answer with what they should be, and describe a difference.

The bound is the one of tools/compare.py; `scale` is the largest number of all arrays together.
"""

from collections.abc import Callable, Iterable

import numpy as np

from minidist.course.question import Answer
from minidist.tools import compare

Causes = dict[str, np.ndarray]


def near(got: np.ndarray, want: np.ndarray, scale: float = 0.0) -> bool:
    """Return whether two arrays are equal up to rounding."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return False
    allowed = compare.BOUND * (compare.scale(want, scale) or 1e-3)
    return bool(np.abs(got - want).max(initial=0.0) <= allowed)


def differ(
    name: str, answer: Answer, want, causes: Causes | None = None, scale: float = 0.0
) -> str | None:
    """Return None if answer[name] is `want`, else where it is not.

    causes  {an explanation: the array that it would give}
    """
    want = np.asarray(want)
    if name not in answer:
        return f"{name} is missing"
    got = answer[name]
    if near(got, want, scale):
        return None
    for cause, wrong in (causes or {}).items():
        if near(got, np.asarray(wrong), scale):
            return f"{name} is wrong: {cause}"
    if got.shape != want.shape:
        return f"{name} has the shape {list(got.shape)}, not {list(want.shape)}"
    off = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    worst = np.unravel_index(off.argmax(), off.shape)
    place = f"[{', '.join(map(str, worst))}]" if worst else ""
    ratio = (
        f", {got[worst] / want[worst]:.4g} times as much"
        if off[worst] < np.inf and want[worst] and got[worst]
        else ""
    )
    return f"{name}{place} is {apart(got[worst], want[worst])}{ratio}"


def apart(got: np.generic, want: np.generic) -> str:
    """Return "1.5, not 2.5", with enough digits to show the difference."""
    digits = next((n for n in (6, 9, 12) if f"{got:.{n}g}" != f"{want:.{n}g}"), 17)
    narrow = f" (it is {got.dtype})" if got.dtype.kind == "f" and got.itemsize < 8 else ""
    return f"{got:.{digits}g}, not {want:.{digits}g}{narrow}"


def first(verdicts: Iterable[str | None]) -> str | None:
    """Return the first verdict that is not None, or None."""
    return next((verdict for verdict in verdicts if verdict is not None), None)


def vjp(function: Callable, arrays: list[np.ndarray], grad: np.ndarray) -> list[np.ndarray]:
    """Return the gradient of <grad, function(*arrays)> with respect to each array.

    By complex steps: f(x + ih) = f(x) + ih f'(x) + O(h^2) for an analytic f, so the imaginary part
    over h is the derivative, and no subtraction loses digits.
    """
    h, gradients = 1e-30, []
    for k, array in enumerate(arrays):
        gradient = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            moved = [a.astype(complex) for a in arrays]
            moved[k][index] += 1j * h
            gradient[index] = (grad * function(*moved).imag).sum() / h
        gradients.append(gradient)
    return gradients


def summed_down(grad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum a gradient of a broadcast shape over all places to which one element was copied."""
    home = np.broadcast_to(np.arange(np.prod(shape, dtype=int)).reshape(shape), grad.shape)
    sums = np.bincount(home.reshape(-1), grad.reshape(-1), int(np.prod(shape)))
    return sums.reshape(shape)
