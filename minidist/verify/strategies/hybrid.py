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
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    heads_of,
    padded,
    random_weights,
    transformer_example,
    translator_case,
)
from minidist.verify.strategies.context_parallel import documents
from minidist.verify.strategies.expert_parallel import todays_experts
from minidist.verify.strategies.job import Arrays, Rule, Steps
from minidist.verify.strategies.record import TRANSFORMERS, Costs, record


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


MESHES: dict[int, list[dict]] = {  # ranks: options; other ranks split matrices
    1: [{}, {"experts": 3, "zero": 1}],
    2: [
        {"dp": 2, "schedule": "gpipe"},
        {"pp": 2},
        {"split_sequence": True},
        {"cp": 2},
        {"dp": 2, "ep": 2, "experts": 4},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "micro_batches": 3},
        {"dp": 2, "schedule": "looped_bfs", "chunks": 2},
    ],
    3: [
        {"dp": 3},
        {"pp": 3, "schedule": "zb_h1"},
        {"cp": 3, "experts": 3},
        {"dp": 3, "ep": 3, "experts": 6},
    ],
    4: [
        {"dp": 2, "pp": 2, "zero": 1},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 1},
        {"dp": 2, "pp": 2, "zero": 2},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 3},
        {"dp": 4, "zero": 3, "shards": 2},
        {"pp": 2, "schedule": "gpipe", "split_sequence": True},
        {"pp": 2, "schedule": "zb_v"},
        {},
        {"cp": 2, "attention": "ulysses"},
        {"cp": 4, "ulysses": 2, "documents": True},
        {"pp": 2, "cp": 2, "attention": "gathered", "documents": True},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3, "zero": 1},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3, "zero": 3},
        {"dp": 2, "ep": 2, "experts": 4},
    ],
    8: [
        {"dp": 2, "pp": 2},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "split_sequence": True, "chunks": 2},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3},
        {"dp": 2, "pp": 2, "cp": 2, "ep": 2, "experts": 4, "schedule": "zb_h1"},
        {"dp": 4, "cp": 2, "ep": 2, "experts": 4, "zero": 1},
        {"dp": 2, "pp": 2, "zero": 3},
        {"dp": 2, "cp": 4, "zero": 2, "shards": 4},
        {"cp": 4, "ulysses": 2, "attention": "gathered", "documents": True},
    ],
}
TRANSLATED: dict[int, dict] = {  # ranks: what is asked for a Seq2Seq
    1: {"zero": 1},
    2: {"pp": 2, "schedule": "gpipe"},
    3: {},
    4: {"pp": 2, "schedule": "zb_h1"},
    8: {"dp": 2, "pp": 2, "zero": 1},
}
TODAYS: dict[int, dict] = {  # ranks: what is asked for today's experts
    2: {},
    3: {},
    4: {"dp": 2, "ep": 2, "zero": 1},
    8: {"dp": 2, "cp": 2, "ep": 2, "dispatch": "positions"},
}
LLAMAS: dict[int, list[dict]] = {  # ranks: what is asked for a Llama of 2 heads of keys and values
    2: [{"cp": 2}],
    4: [
        {},
        {"pp": 2, "split_sequence": True},
        {"pp": 2, "schedule": "zb_h1", "zero": 1},
        {"dp": 2, "zero": 3},
    ],
    8: [
        {"dp": 2, "micro_batches": 2, "zero": 1},
        {"pp": 2, "split_sequence": True},
        {"cp": 2, "attention": "gathered"},
    ],
}
SHOWN = {
    "ep": "{} ep",
    "micro_batches": "{} micro-batches",
    "experts": "{} experts",
    "zero": "ZeRO {}",
    "shards": "copies of {}",
    "chunks": "{} chunks",
}
SHOWN |= {"split_sequence": "sequence", "ulysses": "{} ulysses", "documents": "documents"}


def hybrid_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, and schedules, on padded Transformers; and a Seq2Seq."""
    tokens, nexts = generator(0, "hybrid cases").integers(0, 11, (2, 7, 8))
    cases = []
    for asked in MESHES.get(ranks, []):
        options = dict(asked)
        numbers = documents(*tokens.shape) if options.pop("documents", False) else None
        model = nn.Transformer(
            *(11, 16, 8, 3, 8, 2, "float64", 0.2),
            tied=asked.get("zero", 0) < 2,
            experts=options.pop("experts", 0),
            capacity=0.8,
            balance=0.5,
        )
        name = words_of(ranks, asked)
        case = Case(name, random_weights(model), tokens, padded(nexts), options=options)
        cases.append(replace(case, documents=numbers))
    if ranks in TODAYS:
        name = f"today's experts, {words_of(ranks, TODAYS[ranks])}"
        cases.append(Case(name, todays_experts(24, 12), tokens, nexts, options=TODAYS[ranks]))
    for options in LLAMAS.get(ranks, []):
        llama = nn.Llama(11, 16, 8, 2, 2, 8, 2, "float64", hidden=24, tied=options.get("zero") == 1)
        case = Case(f"Llama, {words_of(ranks, options)}", llama, tokens, padded(nexts))
        cases.append(replace(case, model=random_weights(llama), options=options))
    if ranks in TRANSLATED:
        options = TRANSLATED[ranks]
        case = translator_case(depth=2, width=24, heads=12)
        name = f"Seq2Seq, {words_of(ranks, options)}"
        cases.append(replace(case, name=name, options=options))
    return cases


def words_of(ranks: int, options: dict) -> str:
    """Return how a case is called: the axes of its mesh, and what else is asked for."""
    axes = {axis: options.get(axis, 1) for axis in ("dp", "pp", "cp")}
    axes["tp"] = ranks // prod(axes.values())
    words = [" x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)]
    for key, value in options.items():
        if key not in axes:
            words.append(value if isinstance(value, str) else SHOWN[key].format(value))
    return ", ".join(filter(None, words)) or "one rank"


def hybrid_example(ranks: int) -> Case:
    """Return the example with two stages, if there are two ranks; other ranks split matrices."""
    return transformer_example(ranks, pp=min(2, ranks), micro_batches=8)


muon = partial(optim.Muon, lr=0.02, weight_decay=0.1)


def steps_of(model, steps: int) -> int:
    """Return how many steps are taken: at most one with experts, whose rows then go elsewhere."""
    return min(steps, 1) if getattr(model, "experts", 0) else steps


class MuonSteps(Steps):
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


MUON_MESHES: dict[int, list[dict]] = {  # ranks: options; other ranks split matrices
    1: [{}, {"zero": 1}],
    2: [
        {"dp": 2},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 1, "owners": "every"},
        {"pp": 2},
        {},
        {"owners": "every"},
        {"cp": 2, "zero": 1},
        {"dp": 2, "ep": 2, "experts": 4},
    ],
    3: [{"dp": 3, "zero": 2}, {"pp": 3, "schedule": "zb_h1"}, {"dp": 3, "ep": 3, "experts": 6}],
    4: [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 1, "owners": "every"},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 1},
        {"dp": 2, "pp": 2, "zero": 3, "model": "Llama"},
        {"pp": 2, "schedule": "gpipe", "split_sequence": True},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3, "zero": 1},
    ],
    8: [
        {"dp": 2, "pp": 2, "zero": 1},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 4, "zero": 1},
        {"pp": 2, "cp": 2, "owners": "every"},
        {"dp": 4, "zero": 3, "shards": 2, "model": "Llama"},
    ],
}


def muon_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, on padded Transformers with dropout, and on Llamas."""
    tokens, nexts = generator(0, "muon cases").integers(0, 11, (2, 7, 8))
    cases = []
    for asked in MUON_MESHES.get(ranks, []):
        options, more = dict(asked), {"tied": asked.get("zero", 0) < 2, "dtype": "float64"}
        experts, llama = options.pop("experts", 0), options.pop("model", "")
        if llama:
            model: nn.Transformer = nn.Llama(11, 16, 8, 2, 3, 8, **more)
        else:
            more |= {"experts": experts, "capacity": 0.8, "balance": 0.5, "dropout": 0.2}
            model = nn.Transformer(11, 16, 8, 3, 8, **more)
        options["steps"] = 2
        name = f"{plural(steps_of(model, 2), 'step')}, {words_of(ranks, asked)}"
        cases.append(Case(name, random_weights(model), tokens, padded(nexts), options=options))
    return cases


EIGHT_BIT_MESHES: dict[int, list[dict]] = {  # ranks: options; other ranks split matrices
    1: [{}],
    2: [{"dp": 2, "zero": 1}, {"pp": 2, "schedule": "zb_h1"}, {}, {"cp": 2}],
    3: [{"dp": 3}, {"pp": 3}],
    4: [{}, {"dp": 2}, {"dp": 2, "pp": 2}, {"cp": 2}],
    8: [{}, {"dp": 2, "pp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "cp": 2, "schedule": "zb_h1"}],
}


def in_eight_bits(case: Case, block: int | None = 4) -> Case:
    """Return the case with a model, its own from now on, that multiplies in eight bits."""
    multiply_in_eight_bits(case.model, EightBits(block))
    words = "a scale per array" if block is None else f"a scale per {block}"
    return replace(case, name=f"{case.name}, {words}")


def eight_bit_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, with scales of strips and blocks, and of arrays."""
    meshes = EIGHT_BIT_MESHES.get(ranks, [])
    found = [eight_bit_case(ranks, options, block) for options in meshes for block in (4, None)]
    return [*found, *(eight_bit_case(ranks, options, 4, llama=True) for options in meshes[:1])]


def eight_bit_case(ranks: int, options: dict, block: int | None, llama: bool = False) -> Case:
    """Return a case on a mesh; without cp the last strip of each example is shorter."""
    T = 16 if options.get("cp", 1) > 1 else 14
    tokens, nexts = generator(0, "eight-bit cases").integers(0, 11, (2, 5, T))
    model = nn.Transformer(11, 32, 8, 3, 16, 2, "float64")
    if llama:
        heads = 4 if ranks <= 4 else 8  # of keys and values: a rank has all of one
        model = nn.Llama(11, 32, 8, heads, 3, 16, 2, "float64", hidden=32)
    one = block is None or options.get("pp", 1) == 1  # an array is of one micro-batch
    m = {"micro_batches": 1} if one else {}
    name = f"{'Llama' if llama else 'GPT-2'}, {words_of(ranks, options)}"
    case = Case(name, random_weights(model, 1), tokens, nexts, options=options | m)
    return in_eight_bits(case, block)


def programs_of(case: Case, ranks: int) -> Programs:
    """Return the programs of one of its pipelines."""
    schedule, pp = case.options.get("schedule", "1f1b"), case.options.get("pp", 1)
    return order_of(schedule, pp, case.options.get("micro_batches"), case.options.get("chunks"))


mesh_costs = partial(
    Costs,
    limit=lambda case, ranks: (
        case.inputs.size * len(case.model.layers) * heads_of(case.model),
        "examples x positions x layers x heads",
    ),
    cuts="layers and matrices",
    programs=programs_of,
)
STRATEGIES = [
    record(
        "hybrid",
        make=on_mesh,
        cases=hybrid_cases,
        costs=mesh_costs(example=hybrid_example),
        models=TRANSFORMERS,
    ),
    record(
        "muon",
        start=MuonSteps,
        cases=muon_cases,
        costs=mesh_costs(
            example=lambda ranks: transformer_example(ranks, dp=max(1, ranks // 2), zero=1),
            compared=False,
        ),
        models=TRANSFORMERS,
    ),
    record(
        "eight_bits",
        make=on_mesh,
        cases=eight_bit_cases,
        costs=mesh_costs(
            example=lambda ranks: in_eight_bits(hybrid_example(ranks)), compared=False
        ),
        models=TRANSFORMERS,
    ),
]
