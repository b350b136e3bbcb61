"""Muon: momentum made orthogonal, an update that needs whole matrices; AdamW for all else.

Jordan et al. 2024, Muon: An Optimizer for Hidden Layers in Neural Networks, whose coefficients and
five iterations these are; Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2: weight
decay, and updates as large as AdamW's. Letters: W[A, B] a matrix, A inputs and B outputs; G its
gradient; M its momentum, the only state; mu the momentum's factor.

    M = mu M + G;    U = G + mu M (Nesterov);    O = newton_schulz(U);    W -= lr (s O + wd W)

    s = 0.2 sqrt(max(A, B))      "match_rms_adamw": one learning rate serves AdamW, too
    s = sqrt(max(1, B / A))      "original"

An element of O depends on all elements of U, so a rank that has a part of W cannot update it alone.
`whole` is how ranks get the parts of O that they need (parallel/whole_matrices.py).
"""

import math
from collections.abc import Callable, Iterable

from minidist.backend import Array, array_module, widen
from minidist.errors import WrongInput
from minidist.nn import Parameter, Slice
from minidist.nn.flat_parameters import FlatSlice
from minidist.nn.optim.rules import AdamW

Parts = list[tuple[Slice, Array]]  # elements of matrices, and vectors as long as they
Update = Callable[[str, Array], Array]  # (name, U[A, B]) -> what W moves along, [A, B]

ENDS = {"embedding", "head"}  # layers that Jordan et al. leave to AdamW
SIDE_BY_SIDE = {"qkv": 3, "key_value": 2}
SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda A, B: 0.2 * math.sqrt(max(A, B)),
    "original": lambda A, B: math.sqrt(max(1, B / A)),
}


def newton_schulz(x: Array, iterations: int = 5) -> Array:
    """Return X[A, B] with singular values between 0.68 and 1.21 in place of its own.

    X = X / |X|, its Frobenius norm;  then X = a X + (b S + c S S) X  with S = X X^T, on the smaller
    side of X. Five iterations leave those below 1.5e-3 of |X| smaller.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    xp, tall = array_module(x), x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / xp.maximum(xp.sqrt((x * x).sum()), 1e-7)
    for _ in range(iterations):
        s = x @ x.T
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.T if tall else x


def hidden_matrices(name: str, shape: tuple[int, ...]) -> int:
    """Return the number of matrices, side by side, in a parameter of Muon; 0: it is AdamW's.

    Gate and up of a SwiGLU, which share a parameter, are one.
    """
    *layers, kind = name.split(".")
    if len(shape) != 2 or kind != "weight" or layers[0] in ENDS:
        return 0
    return SIDE_BY_SIDE.get(layers[-1], 1)


def alone(parts: Parts, update: Update) -> Iterable[Array]:
    """Update matrices that this rank has all of; ValueError if it has a part."""
    for cut, u in parts:
        if cut.shard is not None or len(cut) < math.prod(cut.shape):
            raise WrongInput(
                f"Muon needs all of {cut.name}{list(cut.shape)}, and this rank has {len(cut)} of "
                "its elements; pass whole=parallel.WholeMatrices(group), with the group of all "
                "ranks that train the model"
            )
        yield update(cut.name, u.reshape(cut.shape)).reshape(-1)


class Muon(AdamW):
    """W -= lr (s O + wd W), and AdamW for what is no matrix of a hidden layer.

    scale     "match_rms_adamw" or "original": which s
    times     what multiplies s: with "original", matrices take a rate some 50 times AdamW's
    matrices  (name, shape) -> how many matrices are side by side in a parameter, by default
              `hidden_matrices`; 0: AdamW updates it
    whole     (parts, update) -> the same parts of the updates; by default `alone`
    cut_of    {flat slice: which elements of its matrix}, of what Muon updates
    """

    momentum: float

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        scale: str = "match_rms_adamw",
        times: float = 1.0,
        matrices: Callable[[str, tuple[int, ...]], int] = hidden_matrices,
        whole: Callable[[Parts, Update], Iterable[Array]] = alone,
    ):
        if scale not in SCALES:
            raise WrongInput(f"scale is one of {', '.join(SCALES)}, not {scale!r}")
        self.momentum, self.scale_of, self.times = momentum, SCALES[scale], times
        self.matrices, self.whole = matrices, whole
        self.cut_of: dict[FlatSlice, Slice] = {}
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.slices = [piece for s in self.slices for piece in self.cut(s)]

    def cut(self, s: FlatSlice) -> list[FlatSlice]:
        """Cut where a matrix begins and ends; what is between two of them stays one slice."""
        pieces: list[FlatSlice] = []
        at = s.start
        for cut in s.slices:
            piece, at = FlatSlice(s.home, at, at + len(cut)), at + len(cut)
            if self.matrices(cut.name, cut.shape):
                self.cut_of[piece] = cut
            elif pieces and pieces[-1] not in self.cut_of:
                piece = FlatSlice(s.home, pieces.pop().start, piece.stop)
            pieces.append(piece)
        return pieces

    def arrays_for(self, s: FlatSlice) -> int:
        return 1 if s in self.cut_of else 2

    def state_like(self, s: FlatSlice) -> Array:
        """Return an array of the state's dtype: M is never rounded to 16 bits."""
        return widen(s.data) if s in self.cut_of else super().state_like(s)

    def directions(self, factor: float) -> list[tuple[Array, float]]:
        """Return s O of each matrix, and the gradient of all else."""
        assert self.state is not None  # the step has begun
        parts = []
        for s, (m, *_) in zip(self.slices, self.state, strict=True):
            if s in self.cut_of:
                g = widen(s.gradient) * factor
                m *= self.momentum
                m += g
                parts.append((self.cut_of[s], g + self.momentum * m))
        updates = iter(self.whole(parts, self.update))
        return [
            (next(updates), 1.0) if s in self.cut_of else (s.gradient, factor) for s in self.slices
        ]

    def update(self, name: str, u: Array) -> Array:
        """Return s O of each of the matrices that are side by side in U[A, B]."""
        width = u.shape[1] // self.matrices(name, u.shape)
        each = [u[:, at : at + width] for at in range(0, u.shape[1], width)]
        size = self.times * self.scale_of(len(u), width)
        return array_module(u).concatenate([size * newton_schulz(x) for x in each], axis=1)

    def rule(self, p, g, m, v=None):
        if v is None:
            p *= 1 - self.lr * self.weight_decay
            p -= self.lr * g
        else:
            super().rule(p, g, m, v)
