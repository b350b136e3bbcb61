"""The calculator: a model, a plan and a machine -> bytes and seconds, and where each comes from.

    answer(dp=4, pp=4, tp=4)   -> {"totals": [...], "memory": [...], "spent": [...], "sent": [...]}
    answer(ask="search")       -> {"plans": [...]}, best first

`minidist.planning` computes all numbers; calculator.toml has what is said of each.
"""

import re
import tomllib
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from minidist.errors import WrongInput
from minidist.pipeline_parallel.schedules import SCHEDULES
from minidist.planning import Machine, Plan, TransformerSize, memory, search, seconds, traffic
from minidist.planning.costs.memory import minidist
from minidist.planning.costs.stages import in_flight
from minidist.planning.costs.zero import BYTES
from minidist.planning.plans.block import rate_of
from minidist.planning.plans.estimate import Estimate, Step
from minidist.planning.plans.plan import ASYNCHRONOUS, EFFICIENCY
from minidist.planning.plans.published import A100, H100, RUNS, SIZES
from minidist.planning.plans.why import WORDS, bytes_of, in_short, seconds_of, where

SIZE = {n: n for n in "layers width heads sequence vocab tied experts top_k shared".split()}
SIZE |= {"hidden": "expert_width", "kv_heads": "kv_heads", "llama": "llama"}
PLAN = {n: n for n in "dp pp tp cp ep micro_batches schedule chunks zero recompute cut".split()}
PLAN |= {"shards": "shards"}  # 0 in the form: None, of all ranks
PLAN |= {"precision": "precision", "split": "sequence"}  # the form's `sequence` is the model's
RATES = {"flops": 12, "memory_bandwidth": 9, "memory": 9, "link": 9, "network": 9, "latency": -6}
RATES["efficiency"] = -2  # the powers of ten of the form's units: TFLOP/s, GB/s, GB, us, percent
SAID = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LONG = re.compile(r"e[+-]?[\d_]{4}", re.I)  # an exponent that no field has
Fields = dict[str, Any]  # names of the form, and their values: ints and text


def fields_of(value: TransformerSize | Plan, names: dict[str, str]) -> Fields:
    fields = {name: getattr(value, attribute) for name, attribute in names.items()}
    fields = {n: 0 if v is None else v for n, v in fields.items()}
    return {n: v if not isinstance(v, bool) else "yes" if v else "no" for n, v in fields.items()}


def rates_of(rates: dict[str, float]) -> Fields:
    return {n: f"{rates[n] / 10**power:g}" for n, power in RATES.items() if n in rates}


FIRST: Fields = {"ask": "first", "batch": 512, "per_node": 8, **fields_of(SIZES["7.5b"], SIZE)}
FIRST |= fields_of(Plan(4, 4, 4, micro_batches=32, zero=1, cut="blocks"), PLAN)
FIRST |= rates_of(A100 | {"efficiency": EFFICIENCY})


@cache
def choices() -> dict[str, Any]:
    """Return the choices of a form, each as the fields that it fills in."""
    models = {name: fields_of(size, SIZE) for name, size in SIZES.items()}
    machines = {"A100": rates_of(A100), "H100": rates_of(H100)}
    runs = {r.name: {**fields_of(r.size, SIZE), **fields_of(r.plan, PLAN)} for r in RUNS}
    for run in RUNS:
        runs[run.name] |= {**rates_of(run.rates), "batch": run.batch, "per_node": 8}
    schedules = [name for name in SCHEDULES if name not in ASYNCHRONOUS]
    return {"runs": runs, "models": models, "machines": machines, "schedules": schedules}


def answer(ask: str = "estimate", **question: int | str) -> Fields:
    """Return an estimate; to "search" the best plans; to "first" also what can be chosen."""
    if unknown := question.keys() - FIRST.keys():
        raise WrongInput(f"the calculator has no {', '.join(sorted(unknown))}")
    fields = FIRST | question
    size, plan, machine, batch = values_of(fields)
    if ask == "search":
        plans = [row(e) for e in search(size, machine, batch, wanted=5, others=5)]
        return {"plans": [e for e in plans if e["fits"]] + [e for e in plans if not e["fits"]][:5]}
    result = estimate(size, plan, machine, batch) | {"published": None}
    for kind in ("models", "machines", "runs"):
        same = (
            name for name, choice in choices()[kind].items() if choice.items() <= fields.items()
        )
        result[kind] = next(same, "")
    if run := next((run for run in RUNS if run.name == result["runs"]), None):
        printed = {"seconds": seconds_of(run.seconds), "mfu": f"{run.mfu:.1%}"}
        ratio = result["totals"][0]["value"] / run.seconds
        result["published"] = printed | {"value": run.seconds, "ratio": f"{ratio:.2f}"}
    return result | ({"choices": choices()} if ask == "first" else {})


def row(e: Estimate) -> Fields:
    """Return a plan that the search found, as text and as fields of the form."""
    time = f"{'' if e.simulated else '>= '}{seconds_of(e.seconds)}"
    shown = {"short": in_short(e.plan), "seconds": time, "held": bytes_of(e.held), "fits": e.fits}
    return shown | {"mfu": f"{e.mfu:.0%}", "why": e.why, "fields": fields_of(e.plan, PLAN)}


def values_of(fields: Fields) -> tuple[TransformerSize, Plan, Machine, int]:
    """Return the values in a form. ValueError: the package's own sentence."""
    meanings = {"yes": True, "no": False}
    values: Fields = {name: meanings.get(value, value) for name, value in fields.items()}
    size = TransformerSize(**{attribute: values[name] for name, attribute in SIZE.items()})
    values["shards"] = values["shards"] or None
    plan = Plan(**{attribute: values[name] for name, attribute in PLAN.items()})
    rates: Fields = {name: number(values[name], power) for name, power in RATES.items()}
    return size, plan, Machine(plan.ranks, values["per_node"], **rates), values["batch"]


def number(text: str, power: int) -> float | str:  # text that is no number: Machine names it
    try:  # a fraction that is exact has all the digits of 1e999999999
        exact = None if LONG.search(str(text)) else Fraction(text) * Fraction(10) ** power
        return str(text) if exact is None else float(exact)
    except (ValueError, OverflowError, ZeroDivisionError):
        return str(text)  # of infinity, too, which JSON does not have


def estimate(size: TransformerSize, plan: Plan, machine: Machine, batch: int) -> Fields:
    """Return all numbers of a step, in groups, each with what is said of it."""
    e, block = seconds(size, plan, machine, batch), Step(size, plan, machine, batch).block
    here = {**vars(plan), **vars(size), **fullest_rank(size, plan, batch), "where": where(e)}
    here |= {"hidden": size.hidden, "key_heads": size.key_heads, "sharing": plan.sharing}
    here |= {"ranks": plan.ranks, "peak": machine.flops, "flops": size.flops(batch)}
    here |= {"taken": e.seconds, "room": bytes_of(e.room), "head": seconds_of(block.head.total)}
    groups: Fields = {"fits": e.fits, "room": e.room, "room_text": here["room"]}

    def add(group: str, name: str, value: float, text: str, **more) -> None:
        entry = {"words": WORDS.get(name, name)} | SAID[group][name]
        entry |= {"name": name, "value": value, "text": text}
        groups.setdefault(group, []).append(entry | {"here": entry["here"].format(**here, **more)})

    add("totals", "seconds", e.seconds, seconds_of(e.seconds))
    add("totals", "mfu", e.mfu, f"{e.mfu:.1%}")
    add("totals", "held", e.held, bytes_of(e.held))
    add("totals", "parameters", size.parameters, f"{size.parameters / 1e9:.4g} billion")
    widths = BYTES[plan.precision, 16]
    for (kind, n), width in zip(e.memory.items(), (*widths, 1), strict=True):
        add("memory", kind, n, bytes_of(n), one=width, numbers=n // width)
    for name, time in e.spent.items():
        one = seconds_of(block.spent[name].total) if name in block.spent else ""
        add("spent", name, time, seconds_of(time), one=one, states=sum(widths))
    for axis, (n, operations) in traffic(size, plan, batch).items():
        used, rate = seconds_of(e.communication[axis]), bytes_of(rate_of(axis, plan, machine))
        if n:
            add("sent", axis, n, bytes_of(n), operations=operations, used=used, rate=rate)
    return groups


def fullest_rank(size: TransformerSize, plan: Plan, batch: int) -> Fields:
    """Return the pipeline rank that holds most, its forward passes that wait, a block's bytes."""
    shape = plan.schedule, plan.pp, plan.micro_batches, plan.chunks
    held = {r: memory(size, plan, batch, r) for r in range(plan.pp)}
    rank = max(held, key=lambda r: sum(held[r].values()))
    waiting = max(sum(point[: plan.chunks]) for point in in_flight(*shape)[rank])
    kept = minidist(size, plan, batch // (plan.dp * plan.micro_batches))
    return {"rank": rank, "waiting": waiting, "kept": bytes_of(kept.block)}


def as_text(groups: Fields) -> str:
    form = "{words}: {text} = {equation}. Here: {here}. {function}; {test}"
    return "\n".join(form.format(**each) for group in SAID for each in groups.get(group, []))
