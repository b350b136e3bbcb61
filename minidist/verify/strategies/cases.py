"""The inputs on which a strategy is tried, its results on a rank, and one device's results."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import host_copy, on_gpu, to_device
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.nn.embedding import BEGIN, END, PAD
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
        return self.loss(model(x, self.batch.randomness), self.targets)

    def to(self, device: str) -> "Case":
        """Return the same case with the model and all arrays on a device; itself on the host."""
        if device == "cpu" and not on_gpu(self.inputs):
            return self
        model = copy.deepcopy(self.model).to(device)
        inputs, targets = (to_device(array, device) for array in (self.inputs, self.targets))
        return replace(self, model=model, inputs=inputs, targets=targets)


def given(model: nn.Module, inputs, targets, loss: Callable | None, options: dict) -> Case:
    """Return the case of a reader's model and batch, arrays or tensors, in float64 on the host."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        words = "interop.torch.load gives one PyTorch's weights"
        raise WrongInput(f"a model is an nn.Module of minidist, not {kind}; {words}")
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
    values are returned instead; and for the bias of a router, by which it will move: `shares`.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    if isinstance(x, Tensor):
        named[INPUT] = x
    return {
        name: np.zeros(p.shape, p.dtype) if p.grad is None else host_copy(p.grad)
        for name, p in named.items()
    } | moved_by_forward(model)


def moved_by_forward(model: nn.Module) -> dict[str, np.ndarray]:
    """Return what a forward pass has moved: the running statistics that train, and `shares`."""
    norms = [norm for norm in model.modules(nn.BatchNorm) if norm.training]
    statistics = [p for norm in norms for p in (norm.running_mean, norm.running_var)]
    return {str(p.name): host_copy(p.data) for p in statistics} | shares(model)


def shares(model: nn.Module) -> dict[str, np.ndarray]:
    """Return, by the name of a router's bias, each expert's share of the choices so far: [E]."""
    balances = list(model.modules(nn.BiasBalance))
    return {b.bias.name: b.load / max(1, b.load.sum()) for b in balances}


def heads_of(model: nn.Module) -> int:
    """Return H of a Transformer or a Seq2Seq, whose second layer is a block."""
    match model.layers[1]:
        case nn.Block() | nn.ExpertBlock() | nn.EncoderBlock() as block:
            return block.attention.heads
    raise TypeError("the second layer of a Transformer is a block")


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


def small_cases(ranks: int) -> list[Case]:
    """An MLP on 7 examples and on 2, a tied Transformer on 6, with experts on 5, a Llama on 4.

    The targets of the tied Transformer are padded.
    """
    random = generator(0, "cases")
    images, labels = random.standard_normal((7, 6)), random.integers(0, 3, 7)
    tokens, nexts = random.integers(0, 11, (2, 6, 5))
    mlp = nn.MLP([6, 9, 5, 3], activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2, tied=True)
    experts = nn.Transformer(11, 8, 2, 1, 5, 2, "float64", 0.2, experts=3, capacity=0.75)
    llama = random_weights(nn.Llama(11, 8, 4, 2, 2, 5, 2, "float64", 12, dropout=0.2))
    return [
        Case("MLP, 7 examples", mlp, images, labels),
        Case("Transformer, 6 examples, padded", transformer, tokens, padded(nexts)),
        Case("MLP, 2 examples", mlp, images[:2], labels[:2]),
        Case("Transformer with experts, 5 examples", experts, tokens[:5], nexts[:5]),
        Case("Llama, 4 examples", llama, tokens[:4], nexts[:4]),
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


def cnn_example(ranks: int) -> Case:
    """Return a CNN for the table of costs: no Transformer has batch norms."""
    random = generator(0, "strategy table")
    images, labels = random.standard_normal((8, 1, 8, 8)), random.integers(0, 10, 8)
    return Case("example", nn.CNN(1, 10, dtype="float64"), images, labels)


EXAMPLE = {"B": 8, "T": 16, "C": 32, "H": 8, "L": 6, "V": 64}  # what all strategies are compared on


def transformer_example(ranks: int, experts: int = 0, **options) -> Case:
    """Return the Transformer and the batch on which strategies are compared."""
    B, T, C, H, L, V = EXAMPLE.values()
    tokens, nexts = generator(0, "strategy table").integers(0, V, (2, B, T))
    model = nn.Transformer(V, C, H, L, T, dtype="float64", experts=experts)
    return Case("example", model, tokens, nexts, options=options)
