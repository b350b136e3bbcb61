"""Why a plan is not the best, in words: what it does not fit, or where its time goes."""

from minidist.planning.plans.estimate import Estimate
from minidist.planning.plans.plan import ASYNCHRONOUS, LEFT_OUT, Plan

WORDS = {  # what a step's seconds are spent on
    "products": "products",
    "element-wise": "norms, gelu and softmax",
    "tensor": "waiting for tp",
    "experts": "waiting for ep",
    "context": "waiting for cp",
    "data": "waiting for dp",
    "optimizer": "the optimizer",
    "waiting": "waiting for other stages",
}
LEGEND = (
    "dp, pp, cp, tp, ep: ranks along the axes; m: micro-batches; v: stages of a rank; "
    "ZeRO 3 of 8: a copy per 8 ranks;\n>=: a lower bound, of what does not fit; "
    "MFU: the model's FLOPs, recomputation not counted, as a share of the peak"
)
NOT_TRIED = (
    f"Not tried: {', '.join(ASYNCHRONOUS)} (their gradients are not one device's), "
    f"{', '.join(LEFT_OUT)} (the first never fills a pipeline, the second is a search for measured "
    "times),\nZeRO 2 and 3 with stages of layers (each micro-batch would send all gradients or "
    "weights)"
)


def why_slower(e: Estimate, best: Estimate) -> str:
    """Return how much slower it is, and what takes most of the time more."""
    slower = e.seconds / best.seconds - 1
    if slower < 5e-4:
        return "as fast"
    costs = {name: spent - best.spent.get(name, 0.0) for name, spent in e.spent.items()}
    name = max(costs, key=lambda part: costs[part])
    return f"{slower:.1%} slower: {seconds_of(costs[name])} more {WORDS[name]}"


def where(e: Estimate) -> str:
    """Return the shares of a step's seconds by what they are spent on, the mean over all ranks."""
    shares = {WORDS[name]: spent / e.seconds for name, spent in e.spent.items()}
    return ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005)


def why_too_large(e: Estimate, leanest: bool) -> str:
    """Return how much too large it is, and what takes most of it."""
    name = max(e.memory, key=lambda kind: e.memory[kind])
    how = "at its leanest it needs" if leanest else "needs"
    return f"{how} {bytes_of(e.held)} of {bytes_of(e.room)}, {bytes_of(e.memory[name])} for {name}"


def line(e: Estimate) -> str:
    """Return a row: the time, or >= a bound; what the fullest rank holds; MFU; the plan; why."""
    time = f"{'' if e.simulated else '>='}{seconds_of(e.seconds)}"
    why = e.why or "the best"
    return f"{time:>10} {bytes_of(e.held):>9} {e.mfu:>5.0%}  {in_short(e.plan)}: {why}"


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
    parts = axes or ["one rank"]
    parts.append(f"m={plan.micro_batches}")
    if plan.pp > 1:
        parts.append(plan.schedule + (f" v={plan.chunks}" if plan.chunks > 1 else ""))
    if plan.zero:
        parts.append(f"ZeRO {plan.zero}" + (f" of {plan.shards}" if plan.shards else ""))
    if plan.recompute != "none":
        parts.append(f"recompute {plan.recompute}")
    if plan.sequence:
        parts.append("sequence")
    return " ".join(parts)
