"""Wrong gradients of a model with experts: what decides by who else is in the batch, and sums.

A part is one data-parallel rank's share of one micro-batch, as in examples.py.
"""

import copy
from dataclasses import replace

from minidist import nn
from minidist.tools.causes.counterfactuals import of_examples
from minidist.tools.causes.finding import Finding, Gradients, some
from minidist.tools.strategies.cases import Case, one_device


def mixture(f: Finding) -> str | None:
    """Examine a model with experts; None for other models."""
    if not any(nn.mixtures(f.case.model)):
        return None
    return _averaged(f) or _mixed_up(f) or _decided_alone(f)


def _averaged(f: Finding) -> str | None:
    """Experts alone are wrong, by the number of ranks."""
    N, wrong = len(f.got), [name for name in f.wrong if ".experts." in name]
    if N == 1 or wrong != f.wrong:
        return None
    for factor, done in ((1 / N, "averaged over all ranks"), (N, f"added up {N} times")):
        for rank in range(N):
            if not all(f.near(f.got[rank][n] / factor, f.want[n], n) for n in wrong):
                break
        else:
            return (
                f"ratio {factor:.4g}, only in experts ({some(wrong)}): {done}, though an expert's "
                "one rank has the rows of all ranks, and so the whole sum"
            )
    return None


def _mixed_up(f: Finding) -> str | None:
    """Experts alone are wrong: every one has the sum of some experts' gradients, not its own."""
    E, wrong = f.case.model.experts, [name for name in f.wrong if ".experts." in name]
    if wrong != f.wrong:
        return None
    for apart in [n for n in range(1, E) if E % n == 0]:
        for name in wrong:
            block, _, rest = name.partition(".experts.")
            e, _, part = rest.partition(".")
            alike = [f"{block}.experts.{i}.{part}" for i in range(int(e) % apart, E, apart)]
            together = sum(f.want[other] for other in alike)
            if not all(f.near(got[name], together, name) for got in f.got):
                break
        else:
            return (
                f"experts that are {apart} apart have the sum of each other's gradients "
                f"({some(wrong)}): summed over ranks that hold different experts"
            )
    return None


def _decided_alone(f: Finding) -> str | None:
    """Each part has the gradient of a batch of its own, which is not its part of the whole."""
    if len(f.split.parts(len(f.case.inputs))) < 2 or not f.is_everywhere(_sum_of_parts(f, f.case)):
        return None
    alone = "equals the sum of what one device computes for each part of the batch alone: "
    silent = _without_balance(f.case)
    parts, whole = _sum_of_parts(f, silent), one_device(silent)
    if all(f.near(parts[n], whole[n], n) for n in whole):
        return alone + "the balancing loss is divided by the examples of the part, not of the batch"
    return alone + "what experts drop is decided on the tokens of the part"


def _sum_of_parts(f: Finding, case: Case) -> Gradients:
    parts = f.split.parts(len(case.inputs)).values()
    found = [of_examples(case, rows) for rows in parts]
    return {name: sum(part[name] for part in found) for name in found[0]}


def _without_balance(case: Case) -> Case:
    model = copy.deepcopy(case.model)
    for each in nn.mixtures(model):
        each.balance = 0.0
    return replace(case, model=model)
