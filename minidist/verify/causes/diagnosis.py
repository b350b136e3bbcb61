"""Why a row of `verify` is red, in words: from its numbers first, and then from the register."""

from collections import Counter

from minidist.comm.communicator import BY_FORMULA
from minidist.verify.causes import cause_of, rerun
from minidist.verify.causes.finding import Finding
from minidist.verify.causes.gradients import cause, right_from
from minidist.verify.strategies import Case, Strategy, one_device
from minidist.verify.strategies.cases import Outcome


def diagnosis(
    entry: Strategy, case: Case, outcomes: list[Outcome], right_bytes: bool, again: bool
) -> list[str]:
    """Return what wrong gradients show about the cause and its place.

    right_bytes  whether the expected number of bytes moved
    again        whether to run the case with the register's mistakes, where no number shows a cause
    """
    got = [o.gradients for o in outcomes]
    if outcomes[0].reference is not None:
        words = [cause_of.versions([o.used for o in outcomes]) or outcomes[0].message]
    else:
        held = tuple(_held(case, outcome) for outcome in outcomes)
        split = entry.split(case, len(got))
        finding = Finding(got, one_device(case), case, split, held, right_bytes)
        words = [cause(finding), right_from(finding)]
    if words[0] is None and again:
        words[0] = rerun.known(entry.name, case, got)
    return [word for word in words if word]


def _held(case: Case, outcome: Outcome) -> dict[str, tuple]:
    """Return {name: (the weights that a rank has, the weights that it should have)}."""
    weights = case.model.state()
    return {
        name: (found, weights[name] if shard is None else shard.of(weights[name]))
        for name, (found, shard) in outcome.held.items()
    }


def byte_words(outcomes: list[Outcome], formula: int) -> list[str]:
    """Return what is to be said of the bytes that moved, per operation, if that is known."""
    moved = sum((Counter(o.operations) for o in outcomes), start=Counter())
    total, words = sum(o.bytes for o in outcomes), []
    if total != formula:
        parts = ", ".join(f"{operation} {n}" for operation, n in moved.items())
        words.append(f"{total} bytes moved, not {formula}" + (f" ({parts})" if parts else ""))
    computed = dict.fromkeys(op for o in outcomes for op in o.operations if op.endswith(BY_FORMULA))
    if computed:
        words.append(f"not counted: {', '.join(computed)}")
    return words
