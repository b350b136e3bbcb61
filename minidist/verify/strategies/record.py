"""A strategy is one record, from which everything about it is read.

`minidist verify`, the diagnosis of a wrong gradient, the table of costs, the certificates that
mutants meet and the README's table read the record and know no names. What can be said in words and
numbers is in records.toml and cases.toml; the other files of this folder have what runs, each in a
list STRATEGIES.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minidist import nn
from minidist.autograd import no_grad
from minidist.errors import WrongInput, check_number, check_options
from minidist.nn.cnn import ConvBlock
from minidist.parallel.trainer import Trainer
from minidist.pipeline_parallel.actions import Programs
from minidist.planning.costs.strategies import shapes_of
from minidist.tensor_parallel.spatial_parallel import ROWS
from minidist.verify.strategies.cases import (
    Case,
    as_input,
    heads_of,
    listed,
    servers_among,
    transformer_example,
)
from minidist.verify.strategies.job import AtWork, Job


@dataclass(frozen=True)
class Models:
    """The models that a strategy can split: in words, and as a test."""

    description: str
    include: Callable[[Any], bool]


def _of(description: str, *kinds: type) -> Models:
    return Models(description, lambda model: isinstance(model, kinds))


def _is_linear(model: nn.Module) -> bool:
    layers = model.layers if isinstance(model, nn.Sequential) else [model]
    return all(isinstance(layer, nn.Linear) for layer in layers)


MODELS = {
    "any": _of("an nn.Module", nn.Module),
    "layers": _of("an nn.Sequential, such as nn.MLP or nn.Transformer", nn.Sequential),
    "linear layers": Models("an nn.Sequential of nn.Linear layers, such as nn.MLP", _is_linear),
    "Transformer": _of("an nn.Transformer", nn.Transformer),
    "Transformers": _of("an nn.Transformer or an nn.Seq2Seq", nn.Transformer, nn.Seq2Seq),
    "experts": Models(
        "an nn.Transformer with experts=",
        lambda model: isinstance(model, nn.Transformer) and model.experts > 0,
    ),
    "CNN": _of("an nn.CNN", nn.CNN),
    "Siamese": _of("an nn.Siamese", nn.Siamese),
}


def _rows_of_images(case: Case) -> int:
    """Return the rows of the last output: a skip with a convolution goes with half the rows."""
    halvings = sum(block.skip is not None for block in case.model.modules(ConvBlock))
    return -(-case.inputs.shape[ROWS] // 2**halvings)


# The largest useful number of ranks for a case: each of them then has one of what the name says.
LIMITS: dict[str, Callable[[Any, int], int]] = {
    "examples": lambda case, ranks: len(case.inputs),
    # Asynchronous workers may have separate minibatches; stale gradients limit them.
    "examples and servers": lambda case, ranks: len(case.inputs) + servers_among(ranks),
    "positions": lambda case, ranks: case.inputs.shape[1],
    "heads": lambda case, ranks: heads_of(case.model),
    "heads or positions": lambda case, ranks: min(heads_of(case.model), case.inputs.shape[1]),
    "tokens": lambda case, ranks: case.model.vocab,
    "rows": lambda case, ranks: min(rows for rows, _ in shapes_of(case.model)),
    "columns": lambda case, ranks: min(columns for _, columns in shapes_of(case.model)),
    "channels": lambda case, ranks: min(
        block.second.norm.gain.size for block in case.model.modules(ConvBlock)
    ),
    "rows of images": lambda case, ranks: _rows_of_images(case),
    "experts": lambda case, ranks: min(case.model.experts, len(case.inputs)),
    "branches": lambda case, ranks: 2,
    "examples x positions x layers x heads": lambda case, ranks: (
        case.inputs.size * len(case.model.layers) * heads_of(case.model)
    ),
}
SHORTER = {"heads or positions": "heads", "rows of images": "rows"}


@dataclass(frozen=True)
class Costs:
    """What is known of a step's costs; all others are measured (observe/costs.py).

    bytes     (case, ranks) -> bytes that all ranks together send, where a paper prints
              them; None: a snapshot of the ledgers has them (tests/ledgers.txt)
    limited_by
              a key of LIMITS, or "layers": each stage of the programs has one
    cuts      what is split: "examples", "servers", "layers", "matrices", "layers and matrices",
              "branches", "positions", "examples and experts"; lesson 20's figure has a
              colour for each
    programs  (case, ranks) -> the programs of a pipeline, which say how long its ranks wait
    example   ranks -> the case on which strategies are compared
    compared  whether it is one of those to choose from, in lesson 20
    """

    bytes: Callable[[Case, int], int] | None = None
    limited_by: str = "examples"
    cuts: str = "examples"
    programs: Callable[[Case, int], Programs] | None = None
    example: Callable[[int], Case] = transformer_example
    compared: bool = True

    def limit(self, case: Case, ranks: int) -> tuple[int, str]:
        """Return the largest useful number of ranks, and the part of which each then has one."""
        if self.limited_by == "layers" and self.programs is not None:
            chunks = len(self.programs(case, ranks).placement[0])
            part = "layers" if chunks == 1 else f"layers, {chunks} on each"
            return len(case.model.layers) // chunks, part
        return LIMITS[self.limited_by](case, ranks), SHORTER.get(self.limited_by, self.limited_by)


@dataclass(frozen=True)
class Strategy:
    """A strategy as all other code sees it.

    idea     what it does, in a few words; `term` the same in Chinese
    paper    authors, year, section
    family   strategies whose mistakes the same tests find
    files    the file of the idea, then further files, as paths below minidist/
    lesson   the name of its lesson
    make     (model, group, **options) -> the Trainer that it is
    start    (group, case, **options) -> Job: the strategy at work, on every rank (see job.py); by
             default the Trainer with one batch
    promise  "exact": equal to one device within the bound; "replayed bitwise": equal, bit for bit,
             to a replay with the same stale weights; "invariant": it changes the numbers on
             purpose, and is equal, bit for bit, to a replay on one device with the same sums; in
             the limit in which it changes nothing, it is exact. Where MPI or NCCL adds floats in an
             order of its own, both are promised up to the order of sums: see `equivalence.check`
    cases    ranks -> models and batches that the strategy can split on these ranks
    ranks    the numbers of ranks on which it is shown
    models   the models that it can split
    check_case
             (case, ranks): raises ValueError for options that these ranks cannot run
    worker   (group, case, **options) -> Outcome, on every rank; None: `start`, see outcomes.py
    """

    name: str
    idea: str
    term: str
    paper: str
    family: str
    files: tuple[str, ...]
    lesson: str
    cases: Callable[[int], list[Case]]
    costs: Costs
    make: Callable[..., Trainer] | None = None
    start: Callable[..., Job] = None  # type: ignore[assignment]  # __post_init__ sets it
    promise: str = "exact"
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    models: Models = MODELS["any"]
    check_case: Callable[[Case, int], object] = lambda case, ranks: None
    worker: Callable | None = None

    def check(
        self, case: Case, ranks: int, options: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Raise ValueError for a model it cannot split, an unknown option, or unfit inputs.

        Everything that runs on ranks is checked here first. A forward pass on one device checks the
        inputs, so that all strategies raise the same error.
        """
        if not self.models.include(case.model):
            raise WrongInput(
                f"{self.name} cannot split {type(case.model).__name__}; "
                f"use {self.models.description}"
            )
        function = self.make or self.start
        bound = [*getattr(function, "keywords", {}), "check_weights"]
        check_options(function, [*case.options, *options], self.name, without=bound)
        case = replace(case, options={**case.options, **options})
        for name, count in case.options.items():
            if name in ("micro_batches", "minibatches") and count is not None:
                check_number(f"{name} is a whole number from 1", count, lambda n: n >= 1, Integral)
        self.check_case(case, ranks)
        with no_grad():
            case.whole_loss(case.model, as_input(case.inputs))

    @property
    def most_ranks(self) -> int:
        """The number of ranks on which it is compared: four, or fewer if it can use only these."""
        return max(size for size in self.ranks if size <= 4)

    def __post_init__(self):
        if self.start is None:
            object.__setattr__(self, "start", partial(AtWork, make=self.make))


def _example(of: str | dict) -> Callable[[int], Case]:
    """Return the maker of an example: the first case of a set, or the Transformer with options."""
    if isinstance(of, dict):
        return partial(transformer_example, **of) if of else transformer_example
    return lambda ranks: listed(of, ranks)[0]


with open(Path(__file__).with_name("records.toml"), "rb") as file:
    RECORDS: dict[str, dict] = tomllib.load(file)


def record(
    name: str,
    bytes: Callable[[Case, int], int] | None = None,
    programs: Callable[[Case, int], Programs] | None = None,
    example: Callable[[int], Case] | None = None,
    **work,
) -> Strategy:
    """Return the record of a strategy that records.toml describes.

    bytes, programs, example  of its Costs
    work  its further fields: make or start, and cases that no table has
    """
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in RECORDS[name].items()
    }
    if "cases" in fields:
        fields["cases"] = partial(listed, fields["cases"])
    fields["models"] = MODELS[fields.get("models", "any")]
    costs: dict[str, Any] = {"example": {}} | fields.pop("costs", {})
    costs |= {"bytes": bytes, "programs": programs}
    costs["example"] = example or _example(costs["example"])
    return Strategy(name=name, costs=Costs(**costs), **fields, **work)
