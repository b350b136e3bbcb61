"""Meshes: data x pipeline x context x tensor, experts within data; Muon and eight bits on them."""

from dataclasses import replace
from functools import partial
from math import prod

from minidist import nn, optim
from minidist.autograd.eight_bits import EightBits
from minidist.comm import Group, Mesh
from minidist.errors import plural
from minidist.hybrid import Hybrid
from minidist.parallel.mixed_precision import multiply_in_eight_bits
from minidist.parallel.trainer import loss_of
from minidist.parallel.whole_matrices import WholeMatrices
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.schedules import order_of
from minidist.verify.strategies.cases import (
    LISTED,
    Case,
    data_of,
    documents,
    padded,
    random_weights,
    todays_experts,
    transformer_example,
    translator_case,
)
from minidist.verify.strategies.job import Arrays, AtWork, Rule
from minidist.verify.strategies.record import record


def on_mesh(
    model: nn.Transformer | nn.Seq2Seq,
    group: Group,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int | None = None,
    schedule: str | list = "1f1b",
    micro_batches: int | None = None,
    **options,
) -> Hybrid:
    """Return this rank's part of a model on a mesh; by default all ranks are on the tensor axis."""
    tp = group.size // (dp * pp * cp) if tp is None else tp
    mesh = Mesh(group, dp=dp, pp=pp, cp=cp, tp=tp)
    return Hybrid(model, mesh, schedule, micro_batches, **options)


SHOWN = {
    "ep": "{} ep",
    "micro_batches": "{} micro-batches",
    "experts": "{} experts",
    "zero": "ZeRO {}",
    "shards": "copies of {}",
    "chunks": "{} chunks",
    "split_sequence": "sequence",
    "ulysses": "{} ulysses",
    "documents": "documents",
}


def meshes(strategy: str, ranks: int) -> list[dict]:
    """Return the meshes of cases.toml for this many ranks: axes and other options."""
    return [dict(asked) for asked in LISTED["meshes"][strategy].get(str(ranks), [])]


def hybrid_cases(ranks: int) -> list[Case]:
    """Several meshes, and schedules, on padded Transformers, Llamas and a Seq2Seq."""
    tokens, nexts = data_of("meshes.tokens")
    cases = []
    for asked in meshes("hybrid", ranks):
        kind = asked.pop("model", "")
        name = ", ".join(filter(None, [kind, name_of(ranks, asked)]))
        numbers = documents(*tokens.shape) if asked.pop("documents", False) else None
        if kind == "Seq2Seq":
            case = translator_case(depth=2, width=24, heads=12)
        elif kind == "today's experts":
            case = Case(name, todays_experts(24, 12), tokens, nexts)
        elif kind == "Llama":
            tied = asked.get("zero") == 1
            llama = nn.Llama(11, 16, 8, 2, 2, 8, 2, "float64", hidden=24, tied=tied)
            case = Case(name, random_weights(llama), tokens, padded(nexts))
        else:
            case = Case(name, transformer_for(asked), tokens, padded(nexts))
        cases.append(replace(case, name=name, options=asked, documents=numbers))
    return cases


def transformer_for(asked: dict) -> nn.Module:
    """Return a Transformer with dropout, tied if ZeRO allows it; take its experts from `asked`."""
    tied, experts = asked.get("zero", 0) < 2, asked.pop("experts", 0)
    more = {"tied": tied, "experts": experts, "capacity": 0.8, "balance": 0.5}
    return random_weights(nn.Transformer(11, 16, 8, 3, 8, 2, "float64", 0.2, **more))


def name_of(ranks: int, options: dict) -> str:
    """Return the name of a case: the axes of its mesh, and its other options."""
    axes = {axis: options.get(axis, 1) for axis in ("dp", "pp", "cp")}
    axes["tp"] = ranks // prod(axes.values())
    parts = [" x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)]
    for key, value in options.items():
        if key not in axes:
            parts.append(value if isinstance(value, str) else SHOWN[key].format(value))
    return ", ".join(filter(None, parts)) or "one rank"


def hybrid_example(ranks: int) -> Case:
    """Return the example with two stages, if there are two ranks; other ranks split matrices."""
    return transformer_example(ranks, pp=min(2, ranks), micro_batches=8)


muon = partial(optim.Muon, lr=0.02, weight_decay=0.1)


def steps_of(model, steps: int) -> int:
    """Return the number of steps: at most one with experts, whose rows then go elsewhere."""
    return min(steps, 1) if getattr(model, "experts", 0) else steps


class MuonSteps(AtWork):
    """Steps of Muon on a mesh, whose result are the weights; without steps, one gradient.

    steps   one with experts: a second one may send rows elsewhere, which no snapshot has
    owners  who updates a whole matrix, see WholeMatrices
    mesh    what on_mesh takes: axes, schedule, ZeRO, ...
    """

    def __init__(self, group: Group, case: Case, steps: int = 0, owners: str = "one", **mesh):
        steps = steps_of(case.model, steps)
        batches = [replace(case.batch, step=step) for step in range(steps)]
        super().__init__(group, case, on_mesh, batches, partial(self.alone, case), muon, **mesh)
        self.matrices, self.groups = WholeMatrices(group, owners), [group, *self.groups]

    def begin(self, rule: Rule) -> None:
        """Make Muon, also where a watch would have another rule."""
        self.optimizer = muon(self.parameters(), whole=self.matrices)

    def alone(self, case: Case) -> Arrays:
        """Return one device's weights."""
        optimizer = muon(case.model.parameters())
        for batch in self.batches:
            loss_of(case.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return case.model.state()


def muon_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, on padded Transformers with dropout, and on Llamas."""
    tokens, nexts = data_of("muon.tokens")
    cases = []
    for asked in meshes("muon", ranks):
        mesh = name_of(ranks, asked)
        if asked.pop("model", ""):
            model = random_weights(nn.Llama(11, 16, 8, 2, 3, 8, dtype="float64"))
        else:
            model = transformer_for(asked)
        name = f"{plural(steps_of(model, 2), 'step')}, {mesh}"
        cases.append(Case(name, model, tokens, padded(nexts), options=asked | {"steps": 2}))
    return cases


def in_eight_bits(case: Case, block: int | None = 4) -> Case:
    """Return the case with a model, its own from now on, that multiplies in eight bits."""
    multiply_in_eight_bits(case.model, EightBits(block))
    scales = "a scale per array" if block is None else f"a scale per {block}"
    return replace(case, name=f"{case.name}, {scales}")


def eight_bit_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, with scales of strips and blocks, and of arrays."""
    several = meshes("eight_bits", ranks)
    cases = [eight_bit_case(ranks, options, block) for options in several for block in (4, None)]
    return [*cases, *(eight_bit_case(ranks, options, 4, llama=True) for options in several[:1])]


def eight_bit_case(ranks: int, options: dict, block: int | None, llama: bool = False) -> Case:
    """Return a case on a mesh; without cp the last strip of each example is shorter."""
    over_positions = options.get("cp", 1) > 1
    name = "eight_bits_over_positions" if over_positions else "eight_bits"
    tokens, nexts = data_of(f"{name}.tokens")
    model = nn.Transformer(11, 32, 8, 3, 16, 2, "float64")
    if llama:
        heads = 4 if ranks <= 4 else 8  # of keys and values: a rank has all of one
        model = nn.Llama(11, 32, 8, heads, 3, 16, 2, "float64", hidden=32)
    undivided = block is None or options.get("pp", 1) == 1  # an array is of one micro-batch
    m = {"micro_batches": 1} if undivided else {}
    name = f"{'Llama' if llama else 'GPT-2'}, {name_of(ranks, options)}"
    case = Case(name, random_weights(model, 1), tokens, nexts, options=options | m)
    return in_eight_bits(case, block)


def programs_of(case: Case, ranks: int) -> Programs:
    """Return the programs of one of its pipelines."""
    schedule, pp = case.options.get("schedule", "1f1b"), case.options.get("pp", 1)
    return order_of(schedule, pp, case.options.get("micro_batches"), case.options.get("chunks"))


STRATEGIES = [
    record(
        "hybrid",
        make=on_mesh,
        cases=hybrid_cases,
        programs=programs_of,
        example=hybrid_example,
    ),
    record(
        "muon",
        start=MuonSteps,
        cases=muon_cases,
        programs=programs_of,
        example=lambda ranks: transformer_example(ranks, dp=max(1, ranks // 2), zero=1),
    ),
    record(
        "eight_bits",
        make=on_mesh,
        cases=eight_bit_cases,
        programs=programs_of,
        example=lambda ranks: in_eight_bits(hybrid_example(ranks)),
    ),
]
