"""Compare an answer with the package's own, and describe the first difference.

Floats are compared within the bound of verify/compare.py, whose scale is the largest float of the
whole answer; everything else exactly.
"""

import numpy as np

from minidist.verify import compare

Answer = dict[str, np.ndarray]

MUCH = 100  # times as many numbers as the package's answer has
SHOWN = 16  # the most whole numbers, truth values or texts of a list that are shown


@np.errstate(all="ignore")  # answers have any numbers
def like_the_package(
    answer: Answer,
    want: Answer,
    bound: float = compare.BOUND,
    free: tuple[str, ...] = (),
    at_most: tuple[str, ...] = (),
) -> str | None:
    """Return None if an answer is the package's, else what is wrong: with a number, and with bytes.

    bound    0.0 compares floats exactly
    free     names, without their ranks, that several right answers differ in
    at_most  numbers that may be smaller than the package's: the largest of all ranks, or all bytes
    """
    both = [(name, answer[name], want[name]) for name in want if name in answer]
    if message := next(filter(None, (of_another_kind(*each) for each in both)), None):
        return message  # before they are added up
    answer, want = (of_all_ranks(numbers, free, at_most) for numbers in (answer, want))
    scale = max((compare.largest(a) for a in want.values() if not whole(a)), default=0.0)
    wrong = {name: differ(name, answer, w, scale, bound) for name, w in want.items()}
    wrong |= {name: f"{name} should not be there" for name in answer if name not in want}
    for name in answer.keys() & want.keys():
        alike = np.shape(answer[name]) == np.shape(want[name])
        if name.startswith(at_most) and alike and (answer[name] <= want[name]).all():
            wrong[name] = None
    found = {name: message for name, message in wrong.items() if message}
    values = [message for name, message in found.items() if not name.startswith("bytes")]
    moved = [message for name, message in found.items() if name.startswith("bytes")]
    return "\n".join(values[:1] + moved[:1]) or None


def flat(value, name: str = "") -> Answer:
    """Return {name: array} of a value of the sandbox.

    A list of numbers is an array. Any other list at the top has a value per rank: "x on rank 2";
    further down its values have numbers: "x 2". A value that is None is left out.
    """
    if isinstance(value, dict):
        inner = {f"{name} {key}".strip(): each for key, each in value.items()}
        return {n: a for key, each in inner.items() for n, a in flat(each, key).items()}
    if not isinstance(value, list) or all(isinstance(each, bool | int | float) for each in value):
        array = np.asarray(value)
        assert value is None or array.dtype.kind in "biufU", f"{name} has too large numbers"
        return {} if value is None else {name or "the answer": array}
    if all(isinstance(each, str) for each in value):
        return {name or "the answer": np.array(value, str)}
    if name:
        return {n: a for k, each in enumerate(value) for n, a in flat(each, f"{name} {k}").items()}
    of_ranks = [flat(each, "the answer" if isinstance(each, list) else "") for each in value]
    return {f"{n} on rank {r}": a for r, answer in enumerate(of_ranks) for n, a in answer.items()}


def check(got, want, **options) -> None:
    """Raise AssertionError if a value is not the package's; options: of `like_the_package`."""
    message = like_the_package(flat(got), flat(want), **options)
    assert message is None, message


def check_form(got, want, exactly: bool = False) -> None:
    """Raise AssertionError if a value has not the names, kinds and dimensions of the package's.

    A NaN where the package has none is refused, and an answer of more than MUCH times its numbers.

    exactly  refuses other numbers, too
    """
    if exactly:
        check(got, want)
    answer, right = flat(got), flat(want)
    numbers, most = size_of(answer), MUCH * (MUCH + size_of(right))
    assert numbers <= most, f"the answer has {numbers} numbers, the package's {size_of(right)}"
    for name in right:
        assert name in answer, f"{name} is missing: is it None, or a `return` missing?"
        other = of_another_kind(name, answer[name], right[name])
        assert other is None, other
        a, b = answer[name], right[name]
        assert a.ndim == b.ndim, f"{name} has the shape {list(a.shape)}, not {list(b.shape)}"
        nan = a.dtype.kind == "f" and np.isnan(a).any() and not np.isnan(b).any()
        assert not nan, f"{name} has a NaN"
    for name in answer:
        assert name in right, f"{name} should not be there"


def size_of(answer: Answer) -> int:
    return sum(array.size for array in answer.values())


def of_all_ranks(answer: Answer, free: tuple[str, ...], at_most: tuple[str, ...]) -> Answer:
    """Return an answer without the free names; the bytes of all ranks added up, one maximum."""
    found: Answer = {}
    for name, value in answer.items():
        what, _, rank = name.partition(" on rank ")
        if what in free:
            continue
        total = f"{what} sent by all ranks together" if what.startswith("bytes") else what
        if np.shape(found.get(total, value)) != np.shape(value):  # [n, 1] and [1, n] make [n, n]
            found[name] = value
        elif rank and what.startswith("bytes"):
            found[total] = np.add(found.get(total, 0), value)
        elif rank and what in at_most:
            found[total] = np.maximum(found.get(total, value), value)
        else:
            found[name] = value
    return found


def differ(
    name: str, answer: Answer, want, scale: float = 0.0, bound: float = compare.BOUND
) -> str | None:
    """Return None if answer[name] is `want`, else where it is not."""
    want = np.asarray(want)
    if name not in answer:
        return f"{name} is missing: is it None, or a `return` missing?"
    got = answer[name]
    if near(got, want, scale, bound):
        return None
    if message := of_another_kind(name, got, want):
        return message
    if got.ndim == want.ndim == 1 and max(got.size, want.size) <= SHOWN and whole(got, want):
        return f"{name} is {got.tolist()}, not {want.tolist()}"
    if got.shape != want.shape:
        return f"{name} has the shape {list(got.shape)}, not {list(want.shape)}"
    if want.dtype == bool and not want.ndim:
        return f"{name}: {got}, not {want}"
    worst = farthest(got, want)
    place = f" at [{', '.join(map(str, worst))}]" if worst else ""
    if not numbers(got, want) or (whole(got, want) and not name.startswith("bytes")):
        return f"{name}{place} is {got[worst]}, not {want[worst]}"
    narrow = f" (it is {got.dtype})" if got.dtype in (np.float16, np.float32) else ""
    return f"{name}{place} is {apart(float(got[worst]), float(want[worst]), narrow)}"


def whole(*arrays: np.ndarray) -> bool:
    """Return whether no array has floats."""
    return all(array.dtype.kind != "f" for array in arrays)


def near(
    got: np.ndarray, want: np.ndarray, scale: float = 0.0, bound: float = compare.BOUND
) -> bool:
    """Return whether two arrays are equal: floats up to rounding, all others exactly.

    It takes arrays of any two kinds: a text is no number, whatever it says.
    """
    if of_another_kind("", got, want):
        return False
    if got.shape != want.shape or whole(got, want) or not bound:
        return np.array_equal(got, want)
    if not (finite := np.isfinite(got)).all():
        alike = np.array_equal(got[~finite], want[~finite], equal_nan=True)
        return alike and near(got[finite], want[finite], scale, bound)
    allowed = bound * (compare.scale(want, scale) or 1e-3)
    with np.errstate(all="ignore"):  # the difference of the largest two floats is inf
        return bool(np.abs(got - want).max(initial=0.0) <= allowed)


def of_another_kind(name: str, got: np.ndarray, want: np.ndarray) -> str | None:
    """Return None if both are texts or both are numbers, else what the answer is."""
    if (got.dtype.kind == "U") == (want.dtype.kind == "U"):
        return None
    return f"{name} is of {got.dtype}, not of {want.dtype}"


def farthest(got: np.ndarray, want: np.ndarray) -> tuple:
    """Return the place of the largest difference; of texts and truth values, the first one."""
    if not numbers(got, want):
        return tuple(map(int, np.argwhere(got != want)[0]))
    off = np.where(np.isfinite(got), np.abs(got.astype(float) - want), np.inf)
    return tuple(map(int, np.unravel_index(off.argmax(), off.shape)))


def numbers(*arrays: np.ndarray) -> bool:
    return all(array.dtype.kind in "fiu" for array in arrays)


def apart(got: float, want: float, kind: str) -> str:
    """Return "1.5, not 3, 0.5 times as much", with enough digits to show the difference."""
    digits = next((n for n in (6, 9, 12) if f"{got:.{n}g}" != f"{want:.{n}g}"), 17)
    message = f"{got:.{digits}g}, not {want:.{digits}g}{kind}"
    if not want or not got or not np.isfinite(got) or abs(got / want - 1) < 1e-3:
        return message
    return f"{message}, {got / want:.4g} times as much"
