"""Muon on a mesh: after some steps the weights are those that one device has with Muon."""

import copy
from functools import partial

from minidist import nn, optim
from minidist.comm import Group
from minidist.datasets import Batch
from minidist.errors import plural
from minidist.replicas.whole_matrices import WholeMatrices
from minidist.rng import generator
from minidist.trainer import loss_of
from minidist.verify.strategies.cases import Case, padded, random_weights, transformer_example
from minidist.verify.strategies.hybrid import OnMesh, mesh_costs, mesh_record, words_of
from minidist.verify.strategies.job import Arrays, OnLoss, Rule

muon = partial(optim.Muon, lr=0.02, weight_decay=0.1)


def steps_of(model, steps: int) -> int:
    """Return how many steps are taken: at most one with experts, whose rows then go elsewhere."""
    return min(steps, 1) if getattr(model, "experts", 0) else steps


class MuonSteps(OnMesh):
    """Steps of Muon, whose result are the weights; without steps, the gradient before one.

    steps   one with experts: a second one may send rows elsewhere, and has no closed form
    owners  who updates a whole matrix, see WholeMatrices
    mesh    what OnMesh takes: axes, schedule, ZeRO, ...
    """

    rule: Rule = staticmethod(muon)

    def __init__(self, group: Group, case: Case, steps: int = 0, owners: str = "one", **mesh):
        steps = steps_of(case.model, steps)
        self.alone = copy.deepcopy(case.model) if steps and group.rank == 0 else None
        super().__init__(group, case, **mesh)
        self.batches = [Batch(case.inputs, case.targets, case.seed, step) for step in range(steps)]
        self.matrices, self.groups = WholeMatrices(group, owners), [group, *self.groups]

    def begin(self, rule: Rule) -> None:
        """Make Muon, also where a watch would have another rule."""
        self.optimizer = muon(self.parameters(), whole=self.matrices)

    def backward(self, on_loss: OnLoss) -> None:
        if not self.batches:
            super().backward(on_loss)
        for batch in self.batches:
            self.hybrid.backward(batch)
            self.hybrid.step(self.optimizer)

    def step(self) -> None:
        if not self.batches:
            super().step()

    def result(self) -> Arrays:
        return self.hybrid.state() if self.batches else super().result()

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        """Return one device's weights."""
        if self.alone is None:
            return None, None
        optimizer = muon(self.alone.parameters())
        for batch in self.batches:
            loss_of(self.alone, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return self.alone.state(), None


MESHES: dict[int, list[dict]] = {  # ranks: what is asked for; the other ranks split matrices
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
    for asked in MESHES.get(ranks, []):
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


STRATEGIES = [
    mesh_record(
        name="muon",
        idea="momentum of whole matrices made orthogonal, whatever cuts the matrices",
        term="Muon优化器, 正交化动量",
        paper="Jordan et al. 2024; Liu et al. 2025 (Moonlight), section 2.3",
        family="hybrid",
        files=("optim/muon.py", "replicas/whole_matrices.py"),
        lesson="16_hybrid",
        start=MuonSteps,
        cases=muon_cases,
        costs=mesh_costs(
            example=lambda ranks: transformer_example(ranks, dp=max(1, ranks // 2), zero=1),
            compared=False,
        ),
        tests=("test_muon.py",),
    )
]
