"""The inputs on which a strategy is tried, its results on a rank, and one device's results.

cases.toml lists the cases; here they are made.
"""

import copy
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import host_copy, on_gpu, to_device
from minidist.context_parallel.cuts import plain
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.nn.embedding import BEGIN, END, PAD
from minidist.parallel import norms_that_train
from minidist.rng import generator
from minidist.verify.interop.torch import as_numpy

INPUT = "(input)"  # the name under which a floating input's gradient is compared


@dataclass(frozen=True)
class Case:
    """A model and a batch: inputs[B, ...] are tokens or floats, targets fit the loss.

    loss       None: the model's; another one is then the model's, where trainers take it from
    options    further arguments of the strategy's start
    documents  numbers of the documents that share the windows [B, T], see Randomness
    """

    name: str
    model: nn.Module
    inputs: np.ndarray
    targets: np.ndarray
    loss: Callable = None  # type: ignore[assignment]  # __post_init__ replaces None
    seed: int = 0
    options: dict = field(default_factory=dict)
    documents: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.loss is None:
            object.__setattr__(self, "loss", self.model.loss)
        elif self.loss != self.model.loss:  # methods are equal, never one object
            object.__setattr__(self, "model", copy.copy(self.model))
            self.model.loss = self.loss

    @property
    def batch(self) -> Batch:
        return Batch(self.inputs, self.targets, self.seed, documents=self.documents)

    def minibatches(self, number: int) -> list[Batch]:
        """Return the batch cut into this many batches in a row, of steps 0, 1, ...; none of 0."""
        cut = np.array_split(np.arange(len(self.inputs)), number) if number else []
        return [
            Batch(self.inputs[rows], self.targets[rows], self.seed, step, rows)
            for step, rows in enumerate(cut)
        ]

    @property
    def total(self) -> int:
        """The number of targets of the whole batch that count: what its loss is divided by."""
        return nn.counted(self.targets)

    def whole_loss(self, model: nn.Module, x: Tensor | np.ndarray) -> Tensor:
        """Return the loss on one device; ValueError where inputs and targets do not agree."""
        return self.loss(model(x, self.batch), self.targets)

    def to(self, device: str) -> "Case":
        """Return the same case with the model and all arrays on a device; itself on the host."""
        if device == "cpu" and not on_gpu(self.inputs):
            return self
        model = copy.deepcopy(self.model).to(device)
        inputs, targets = (to_device(array, device) for array in (self.inputs, self.targets))
        return replace(self, model=model, inputs=inputs, targets=targets)


def readers_case(model: nn.Module, inputs, targets, loss: Callable | None, options: dict) -> Case:
    """Return the case of a reader's model and batch, arrays or tensors, in float64 on the host."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise WrongInput(
            f"a model is an nn.Module of minidist, not {kind}; interop.torch.load gives one "
            "PyTorch's weights"
        )
    x = as_numpy(inputs)
    x = x.astype("float64") if x.dtype.kind == "f" else x
    name = f"{type(model).__name__}, {len(x)} examples"
    model = copy.deepcopy(model).astype("float64")
    return Case(name, model, x, as_numpy(targets), loss or model.loss, options=options)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return {name: parameter} of those that are not frozen."""
    return {name: p for name, p in model.named_parameters().items() if p.requires_grad}


def one_device(case: Case) -> dict[str, np.ndarray]:
    """Return the gradients that one device computes; zero where a parameter is unused or frozen."""
    model = copy.deepcopy(case.model)
    x = as_input(case.inputs)
    case.whole_loss(model, x).backward()
    return collect(model, x)


def collect(model: nn.Module, x: Tensor | np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return {name: gradient} of a model, zeros for None, and the input's if it has one.

    The running statistics of batch norm have no gradient: where they move, in training, their
    values are returned instead; and for the bias of a router, `choice_shares`, by which it moves.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    if isinstance(x, Tensor):
        named[INPUT] = x
    return {
        name: np.zeros(p.shape, p.dtype) if p.grad is None else host_copy(p.grad)
        for name, p in named.items()
    } | moved_by_forward(model)


def moved_by_forward(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the arrays that a forward pass moved: statistics in training, and `choice_shares`."""
    statistics = [
        p for norm in norms_that_train(model) for p in (norm.running_mean, norm.running_var)
    ]
    return {str(p.name): host_copy(p.data) for p in statistics} | choice_shares(model)


def choice_shares(model: nn.Module) -> dict[str, np.ndarray]:
    """Return, by the name of a router's bias, each expert's share of the choices so far: [E]."""
    balances = list(model.modules(nn.BiasBalance))
    return {b.bias.name: b.load / max(1, b.load.sum()) for b in balances}


def heads_of(model: nn.Module) -> int:
    """Return H of a Transformer or a Seq2Seq, whose second layer is a block."""
    block: Any = model.layers[1]
    return block.attention.heads


def as_input(inputs: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Wrap floating inputs in a tensor, whose gradient is compared too; do not wrap tokens."""
    if isinstance(inputs, Tensor):
        return inputs
    return Tensor(inputs, requires_grad=True) if inputs.dtype.kind == "f" else inputs


def random_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give all parameters of a model random values, in place; return it.

    Biases, too, which are 0 at first: a bias of 0 may be added N times, or never, unnoticed.
    """
    for name, p in model.named_parameters().items():
        p.data[...] = 0.5 * generator(seed, f"random {name}").standard_normal(p.shape)
    return model


def padded(targets: np.ndarray) -> np.ndarray:
    """Return targets[B, T] of which examples have 1 to T; the rest of each row is IGNORED."""
    B, T = targets.shape
    lengths = T - 3 * np.arange(B) % T  # for T = 5: 5, 2, 4, 1, 3, 5, ...
    return np.where(np.arange(T) < lengths[:, None], targets, nn.IGNORED)


def documents(B: int, T: int) -> np.ndarray:
    """Return numbers of documents [B, T]: of 1 to 7 positions, other ones in each example."""
    starts = generator(0, "documents").random((B, T)) < 0.3
    return np.cumsum(starts, axis=1)


# The cases of cases.toml.

with open(Path(__file__).with_name("cases.toml"), "rb") as file:
    LISTED: dict[str, dict] = tomllib.load(file)
VALUES = {"none": None, "plain": plain}  # of options, which TOML cannot name


def values_of(options: dict) -> dict:
    """Return options as Python has them."""
    return {key: VALUES.get(str(value), value) for key, value in options.items()}


def listed(name: str, ranks: int) -> list[Case]:
    """Return a set of cases on these ranks."""
    return [case for row in LISTED["cases"][name] for case in _cases(ranks, **row)]


def _cases(
    ranks: int,
    name: str = "",
    of: str = "",
    like: str = "",
    made: str = "",
    on: tuple[int, ...] = (),
    model: str = "",
    data: str = "",
    examples: int | None = None,
    positions: int | str | None = None,
    pad: bool = False,
    packed: bool = False,
    **options,
) -> list[Case]:
    """Return the cases of one row of a set; a row `of` another set changes the cases of that."""
    if on and ranks not in on:
        return []
    if of:
        bases = [case for case in listed(of, ranks) if like in ("", case.name)]
    else:
        bases = [MADE[made]() if made else Case("", model_of(model), *data_of(data))]
    if of and model:
        other = model_of(model)
        bases = [replace(case, model=other, loss=other.loss) for case in bases]
    T = ranks if positions == "ranks" else positions
    cases = []
    for case in bases:
        x, y = case.inputs[:examples], case.targets[:examples]
        if T is not None:
            x, y = x[:, :T], y[:, :T]
        cases.append(
            replace(
                case,
                name=name or case.name,
                inputs=x,
                targets=padded(y) if pad else y,
                options=case.options | values_of(options),
                documents=documents(*x.shape) if packed else case.documents,
            )
        )
    return cases


def model_of(name: str, **changes) -> Any:
    """Return a model that cases.toml describes, with some of its arguments changed."""
    arguments = values_of(LISTED["models"][name] | changes)
    weights, biased = arguments.pop("weights", None), arguments.pop("biased", 1.0)
    choosy, idle = arguments.pop("choosy", False), arguments.pop("idle", False)
    model = getattr(nn, arguments.pop("kind"))(**arguments, dtype="float64")
    if weights is not None:
        random_weights(model, weights)
    for balance in model.modules(nn.BiasBalance):
        balance.bias.data *= biased
    for block in model.modules(nn.ExpertBlock):
        if choosy:
            block.norm_2.gain.data += 2  # else all positions choose the same experts
        if idle:
            gate = block.mixture.gate.weight.data
            gate[:, 1] = (gate[:, 0] + gate[:, 2]) / 2  # one of these two has more
    return model


def data_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets: "small.images.labels", or "small.tokens", which has both."""
    table, *parts = name.split(".")
    rows = dict(LISTED["data"][table])
    random = generator(0, rows.pop("from"))
    arrays = {key: _drawn(random, **row) for key, row in rows.items()}
    inputs, targets = arrays[parts[0]] if len(parts) == 1 else [arrays[part] for part in parts]
    return inputs, targets


def _drawn(
    random: np.random.Generator, shape: list[int], below: int | None = None, above: int = 0
) -> np.ndarray:
    if below is None:
        return above + random.standard_normal(shape)
    return random.integers(0, below, shape)


small_cases = partial(listed, "small")


def mlp_of(hidden: int) -> nn.MLP:
    """Return an MLP of hidden layers, and one more, of different widths."""
    widths = [6, *(5 + i % 3 for i in range(hidden)), 3]
    return nn.MLP(widths, activation="gelu", seed=1, dtype="float64")


def todays_experts(width: int = 8, heads: int = 2) -> nn.Transformer:
    """Return a Transformer whose experts are DeepSeek-V3's, small: many, narrow, shared, biased.

    A position chooses 4 of 8 experts, in at most 2 of 4 groups, and none is dropped.
    """
    return model_of("today's experts", width=width, heads=heads, expert_width=width)


def stream_cases(ranks: int) -> list[Case]:
    """Minibatches of uneven sizes in a row, with momentum; and one alone, at version 0."""
    mlp = mlp_of(ranks)
    transformer = nn.Transformer(11, 8, 2, ranks, 5, seed=2, dtype="float64", dropout=0.2)
    images, tokens = data_of("minibatches.images.labels"), data_of("minibatches.tokens")
    return [
        Case("MLP, 11 minibatches", mlp, *images, options={"minibatches": 11}),
        Case("Transformer, 6 minibatches", transformer, *tokens, options={"minibatches": 6}),
        Case("MLP, 1 minibatch", mlp, *images),
    ]


def translator_case(examples: int = 7, depth: int = 1, width: int = 8, heads: int = 2) -> Case:
    """A Seq2Seq with dropout, vocabularies of 13 and 11; sources of 4, 0, 2, 3 and 1 words, ...

    A rank may have an empty source alone. The weights are random: with biases of 0 a padded
    position would stay zeros without a mask.
    """
    random = generator(0, "translator case")
    S, T, U, V = 4, 5, 13, 11
    sources, (targets, nexts) = (
        random.integers(END + 1, U, (examples, S)),
        random.integers(END + 1, V, (2, examples, T)),
    )
    lengths = np.resize([4, 0, 2, 3, 1], examples)
    sources[np.arange(S) >= lengths[:, None]] = PAD
    targets[:, 0] = BEGIN
    model = random_weights(nn.Seq2Seq(U, V, width, heads, depth, S, T, 2, "float64", dropout=0.2))
    name = f"Seq2Seq, {examples} examples, padded"
    return Case(name, model, np.hstack([sources, targets]), padded(nexts))


def dual_case() -> Case:
    """Two translators and their reconstruction on 5 pairs of 1 to 4 words, padded; dropout."""
    random, pairs = generator(0, "pairs"), 5
    more = {"width": 8, "heads": 2, "depth": 1, "seed": 3, "dtype": "float64", "dropout": 0.2}
    there = nn.Seq2Seq(9, 7, source_length=4, target_length=5, name="there", **more)
    back = nn.Seq2Seq(7, 9, source_length=4, target_length=5, name="back", **more)
    model = nn.Dual(there, back, weight=0.5)
    held = np.arange(4) < random.integers(1, 5, (2, pairs, 1))
    x, y = (random.integers(3, vocab, (pairs, 4)) for vocab in (9, 7))
    x, y = (np.where(h, words, PAD) for h, words in zip(held, (x, y), strict=True))
    tokens = np.concatenate([x, np.full((pairs, 1), BEGIN), y], axis=1)
    return Case(
        "two translators, 5 pairs, padded", model, tokens, model.targets(tokens), model.loss
    )


def rows_of_numbers() -> Case:
    """Return norms of rows of numbers, between linear layers."""
    rows, labels = data_of("norms.rows.labels")
    layers = [
        nn.Linear(6, 5, activation="gelu", name="first", dtype="float64"),
        nn.BatchNorm(5, dtype="float64"),
        nn.Linear(5, 3, name="second", dtype="float64"),
    ]
    return Case("rows, 5 examples", random_weights(nn.Sequential(layers)), rows, labels[:5])


def one_pair() -> Case:
    """Return a single pair, with an output to fit."""
    pairs, outputs = data_of("pairs.pairs.outputs")
    model = nn.Siamese([6, 5, 5], classes=2, activation="relu", seed=2, dtype="float64")
    return Case("1 pair", model, pairs[:1], outputs, nn.squared_error)


def whole_numbers() -> Case:
    """Return an MLP with relu on whole numbers, of which no sum leaves float16's."""
    random = generator(0, "whole numbers")
    model = nn.MLP([4, 8, 4], activation="relu", dtype="float32")
    for name, p in model.named_parameters().items():
        p.data[...] = generator(0, name).integers(-1, 2, p.shape)
    x, y = (random.integers(-2, 3, (8, 4)).astype("float32") for _ in range(2))
    options = {"dtype": "float16", "whole": True, "steps": 1, "start": 2.0**2}
    return Case("whole numbers, as in float32", model, x, y, nn.squared_error, options=options)


MADE: dict[str, Callable[[], Case]] = {
    "translator": translator_case,
    "wide_translator": partial(translator_case, width=24, heads=12),
    "dual": dual_case,
    "rows_of_numbers": rows_of_numbers,
    "one_pair": one_pair,
    "whole_numbers": whole_numbers,
}


def servers_among(ranks: int) -> int:
    """Return the number of ranks that serve: two if at least two are left to work, else one."""
    if ranks < 2:
        raise WrongInput(f"a server and a worker need 2 ranks, not {ranks}; use 2 or more")
    return 1 if ranks < 4 else 2


def transformer_example(ranks: int, experts: int = 0, **options) -> Case:
    """Return the Transformer and the batch on which strategies are compared."""
    tokens, nexts = generator(0, "strategy table").integers(0, 64, (2, 8, 16))
    model = nn.Transformer(64, 32, 8, 6, 16, dtype="float64", experts=experts)
    return Case("example", model, tokens, nexts, options=options)
