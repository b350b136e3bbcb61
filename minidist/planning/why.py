"""Why a plan is not the best, in words: what it does not fit, or where its time goes."""

from minidist.planning.estimate import Estimate
from minidist.planning.plan import Plan


def parts(e: Estimate) -> dict[str, float]:
    """Return what a plan's time is made of, in seconds; what is hidden counts as well."""
    links = {f"communication over {axis}": spent for axis, spent in e.communication.items()}
    return {"computing": e.compute, "waiting for other stages": e.bubble * e.seconds} | links


def why_slower(e: Estimate, best: Estimate) -> str:
    """Say how much slower it is, and what takes most of the time more."""
    more = e.seconds / best.seconds - 1
    how = f"{more:.1%} slower" if e.simulated else f"at least {more:.1%} slower, not simulated"
    if more < 5e-4:
        return "as fast" if e.simulated else "may be as fast, not simulated"
    ours, theirs = parts(e), parts(best)
    costs = {name: spent - theirs[name] for name, spent in ours.items()}
    name = max(costs, key=costs.get)
    return f"{how}: {seconds_of(costs[name])} more {name}" if costs[name] > 0 else how


def why_too_large(e: Estimate, leanest: bool) -> str:
    """Say how much too large it is, and what takes most of it."""
    name = max(e.memory, key=e.memory.get)
    how = "at its leanest it needs" if leanest else "needs"
    return f"{how} {bytes_of(e.held)} of {bytes_of(e.room)}, {bytes_of(e.memory[name])} for {name}"


def line(e: Estimate) -> str:
    """Return a plan's row: its time, or >= a bound of it; what the fullest rank holds; the plan."""
    time = f"{'' if e.simulated else '>='}{seconds_of(e.seconds)}"
    return f"{time:>10} {bytes_of(e.held):>9}  {in_short(e.plan)}: {e.why or 'the best'}"


def seconds_of(time: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, one in (("s", 1), ("ms", 1e-3)):
        if time >= one:
            return f"{time / one:.3g} {unit}"
    return f"{time * 1e6:.3g} us"


def bytes_of(n: float) -> str:
    """Return a number of bytes with three digits and its unit, of powers of ten."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= one:
            return f"{n / one:.4g} {unit}"
    return f"{n:g} B"


def in_short(plan: Plan) -> str:
    """Return a plan in a few words: what is not 1, none or off."""
    axes = [f"{a}={n}" for a in ("dp", "pp", "cp", "tp", "ep") if (n := getattr(plan, a)) > 1]
    words = axes or ["one rank"]
    words.append(f"m={plan.micro_batches}")
    if plan.pp > 1:
        words.append(plan.schedule + (f" v={plan.chunks}" if plan.chunks > 1 else ""))
    if plan.zero:
        words.append(f"ZeRO {plan.zero}")
    if plan.recompute != "none":
        words.append(f"recompute {plan.recompute}")
    return " ".join(words + ["sequence"] * plan.sequence)
