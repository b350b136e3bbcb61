"""The calculator says what `minidist.planning` says, and where each number comes from."""

import importlib
import random
import re
from math import isclose
from pathlib import Path

import pytest

from minidist.observe.pages import calculator
from minidist.observe.pages.answers import answer
from minidist.planning import Machine, Plan, TransformerSize, memory, search, seconds, traffic
from minidist.planning.plans.published import RUNS
from minidist.planning.plans.why import WORDS

ROOT = Path(__file__).parents[2]


def values(found, group):
    return {each["name"]: each["value"] for each in found[group]}


def sources(found):
    return [(group, each) for group in calculator.SAID for each in found.get(group, [])]


def drawn(number):
    """Return the fields of a random plan of a small model on a random machine."""
    draw = random.Random(number)
    one = draw.choice
    dp, pp, tp, cp, m = one((1, 2, 4)), one((1, 2, 4)), one((1, 2, 4)), one((1, 2)), one((1, 2, 8))
    schedule, chunks = one(
        [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_v", 2), ("looped_bfs", 2)]
    )
    experts, llama, zero = one((0, 0, 4)), one(("yes", "no")), one((0, 1, 2, 3))
    experts = 0 if llama == "yes" else experts
    if schedule in ("zb_h1", "zb_v"):
        zero = min(zero, 1)
    return {
        "layers": one((8, 16)),
        "width": one((64, 256)),
        "heads": 8,
        "sequence": one((64, 512)),
        "vocab": one((1000, 1003)),
        "tied": one(("yes", "no")),
        "experts": experts,
        "shared": one((0, 1)) if experts else 0,
        "hidden": one((0, 96)),
        "llama": llama,
        "kv_heads": one((0, 2, 4)) if llama == "yes" else 0,
        "shards": one((0, 0, dp * cp)) if zero and not experts else 0,
        "dp": dp,
        "pp": pp,
        "tp": tp,
        "cp": cp,
        "ep": one((1, dp)) if experts else 1,
        "micro_batches": m,
        "batch": dp * m * one((1, 3)),
        "schedule": schedule,
        "chunks": chunks,
        "zero": zero,
        "recompute": one(("none", "selective", "full")),
        "split": one(("yes", "no")) if cp == 1 and not experts else "no",
        "precision": one(("mixed", "float32")),
        "cut": one(("layers", "blocks")),
        "per_node": one((1, 4, 8)),
        "flops": one(("312", "0.5")),
        "efficiency": one(("57", "100")),
        "memory": one(("0.001", "80")),
        "latency": one(("0", "7")),
    }


def planned(fields):
    """Return size, plan, machine and batch of these fields, made by hand."""
    f = calculator.FIRST | fields
    names = "layers width heads sequence vocab".split()
    parts = {n: f[n] for n in ("experts", "top_k", "shared", "kv_heads")}
    parts |= {"expert_width": f["hidden"], "llama": f["llama"] == "yes"}
    size = TransformerSize(*(f[n] for n in names), f["tied"] == "yes", **parts)
    names = "micro_batches schedule zero recompute precision chunks cut".split()
    mesh = [f[n] for n in ("dp", "pp", "tp", "cp", "ep")]
    options = {n: f[n] for n in names} | {"shards": f["shards"] or None}
    plan = Plan(*mesh, **options, sequence=f["split"] == "yes")
    giga = {n: float(f[n]) * 1e9 for n in ("memory", "link", "network", "memory_bandwidth")}
    rest = {"flops": float(f["flops"]) * 1e12, "latency": float(f["latency"]) * 1e-6}
    share = float(f["efficiency"]) / 100
    return (
        size,
        plan,
        Machine(plan.ranks, f["per_node"], **giga, **rest, efficiency=share),
        f["batch"],
    )


def test_the_page_says_what_planning_says_for_100_drawn_questions():
    fit = set()
    for number in range(100):
        fields = drawn(number)
        size, plan, machine, batch = planned(fields)
        found, want = answer({"page": "calculator", **fields}), seconds(size, plan, machine, batch)
        assert "error" not in found, (fields, found)
        assert values(found, "memory") == want.memory
        assert found["fits"] == want.fits and isclose(found["room"], want.room)
        spent = values(found, "spent")
        assert spent.keys() == want.spent.keys() <= WORDS.keys()
        assert all(isclose(spent[name], time, rel_tol=1e-9) for name, time in want.spent.items())
        totals = values(found, "totals")
        assert isclose(totals["seconds"], want.seconds) and isclose(totals["mfu"], want.mfu)
        assert (totals["held"], totals["parameters"]) == (want.held, size.parameters)
        sent = {axis: n for axis, (n, _) in traffic(size, plan, batch).items() if n}
        assert found.get("sent", []) == [] if not sent else values(found, "sent") == sent
        by_rank = [sum(memory(size, plan, batch, r).values()) for r in range(plan.pp)]
        rank = int(re.search(r"rank (\d+)", found["totals"][2]["here"])[1])
        assert by_rank[rank] == max(by_rank) == want.held
        fit.add(want.fits)
    assert fit == {True, False}


EVERY_AXIS = {"experts": 8, "ep": 4, "cp": 2, "zero": 0, "width": 1024, "link": "1", "network": "1"}


def test_every_number_has_its_source_and_every_source_a_number():
    found = [*sources(calculator.answer()), *sources(calculator.answer(**EVERY_AXIS))]
    assert {(group, each["name"]) for group, each in found} == {
        (group, name) for group, each in calculator.SAID.items() for name in each
    }
    for _, each in found:
        assert not re.search(r"[{}]", each["here"]) and each["here"] and each["equation"]


def test_every_named_function_and_test_exists():
    for said in (each for group in calculator.SAID.values() for each in group.values()):
        path, function = said["function"].split(": ")
        value = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for name in function.split("."):
            value = getattr(value, name)
        path, test = said["test"].split("::")
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text("utf-8"), re.M), said["test"]


@pytest.mark.grid(4)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_published_run_fills_the_form_and_its_seconds_are_beside_the_prediction(run):
    fields = calculator.choices()["runs"][run.name]
    size, plan, machine, batch = calculator.values_of(calculator.FIRST | fields)
    assert (size, plan, batch) == (run.size, run.plan, run.batch)
    assert machine == Machine(plan.ranks, 8, **run.rates, efficiency=0.58)
    if run.plan.pp <= 16:  # the others take up to a second
        found = calculator.answer(**fields)
        assert found["runs"] == run.name and found["published"]["value"] == run.seconds
        want = run.predicted().seconds
        assert values(found, "totals")["seconds"] == want
        assert found["published"]["ratio"] == f"{want / run.seconds:.2f}"
        changed = calculator.answer(**fields | {"per_node": 4})
        assert (changed["runs"], changed["published"]) == ("", None)


def test_the_search_gives_the_best_plans_and_says_why_others_lose():
    fields = {"layers": 12, "width": 768, "heads": 12, "sequence": 1024, "batch": 32}
    fields |= {"dp": 4, "pp": 1, "tp": 1, "zero": 0, "micro_batches": 1, "memory": "6"}
    plans = calculator.answer("search", **fields)["plans"]
    size, _, machine, batch = planned(fields)
    want = search(size, machine, batch, wanted=5, others=5)
    fit = [e for e in want if e.fits]
    assert [row["why"] for row in plans] == [e.why for e in [*fit, *want[len(fit) :][:5]]]
    assert plans[0]["why"] == "" and all(row["why"] for row in plans[1:])
    assert not all(row["fits"] for row in plans)
    for row, e in zip(plans, want, strict=False):  # a plan fills the form, and is what it was
        found = calculator.answer(**fields | row["fields"])
        taken = values(found, "totals")["seconds"]
        assert isclose(taken, e.seconds) or (not e.simulated and taken > e.seconds)
        assert found["fits"] == row["fits"]


def test_a_wrong_combination_gets_the_packages_own_sentence():
    for fields, sentence in [
        ({"tp": 3}, "tp=3 does not divide 32 heads; use a divisor of them"),
        ({"hidden": -1}, "expert_width is a whole number from 1, not -1"),
        ({"shared": 1}, "1 shared experts are beside others; use shared=0"),
        ({"schedule": "zb_v"}, "zb_v has 2 chunks per rank, not 1"),
        ({"batch": 1.5}, "batch is a whole number from 1, not 1.5"),
        ({"flops": "fast"}, "flops is a number above 0, not 'fast'"),
        ({"memory": float("inf")}, "memory is a number above 0, not 'inf'"),
        ({"flops": "1e9999999999"}, "flops is a number above 0, not '1e9999999999'"),  # at once
        ({"recompute": "some"}, "recompute is one of none, selective, full, not 'some'"),
        ({"color": "red"}, "the calculator has no color"),
    ]:
        assert answer({"page": "calculator", **fields}) == {"error": sentence}
