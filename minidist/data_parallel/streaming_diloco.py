"""Streaming DiLoCo: parts of the model meet in turn, while training goes on, in four bits.

Douillard et al. 2025, Streaming DiLoCo with overlapping communication, algorithm 2. Letters as in
local_sgd.py: h local steps between two meetings of a fragment; x the weights that all ranks have in
common, x_r rank r's own; N ranks. Fragment f of n has the layers f, f + n, f + 2 n, ...; t counts
steps, and h_f = (f + 1) h // n.

    t = h_f, h_f + h, ...    send four bits of x - x_r of the fragment, beside the steps that follow
    tau steps later          D = 1/N sum_r (x - x_r);  m = mu m + D;  x = x - lr (D + mu m);
                             x_r = alpha x_r + (1 - alpha) x

alpha keeps a share of what the rank has learnt in these tau steps. With n = 1, tau = 0, alpha = 0
and all bits it is DiLoCo, bit for bit.

Four bits are a sign and three bits of an exponent (their E3M0): 0, or the largest |x - x_r| of a
layer over 1, 2, 4 ... 64. Sums are in the weights' dtype. Nothing left out is remembered.

Bytes of all ranks, once in h steps, for each layer: N (N - 1) (elements / 2 + itemsize).
"""

from itertools import pairwise

from minidist import optim
from minidist.backend import Array, array_module, host_copy
from minidist.comm import Group
from minidist.comm.collectives import reduce_pieces
from minidist.data_parallel.local_sgd import DiLoCo
from minidist.errors import WrongInput, check_number
from minidist.nn import Module

LEVELS = [0.0, *(2.0**-k for k in range(6, -1, -1))]  # what three bits say, of the largest


def four_bits(x: Array) -> tuple[Array, Array]:
    """Return codes of x[n], two in a byte, uint8 [n/2], and the largest |x|, [1].

    A code is the number of the nearest of LEVELS, and 8 if x < 0.
    """
    xp, most = array_module(x), abs(x).max(keepdims=True)
    sizes, codes = abs(x) / xp.where(most > 0, most, 1), xp.zeros(len(x) + len(x) % 2, "uint8")
    for low, high in pairwise(LEVELS):
        codes[: len(x)] += sizes >= (low + high) / 2
    codes[: len(x)] |= xp.where(x < 0, 8, 0).astype("uint8")
    return codes[::2] | codes[1::2] << 4, most


def from_four_bits(codes: Array, most: Array, n: int) -> Array:
    """Return the n numbers that `four_bits` has coded, in the dtype of the largest."""
    xp = array_module(codes)
    each = xp.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:n]
    return xp.asarray([*LEVELS, *(-level for level in LEVELS)], most.dtype)[each] * most


class StreamingDiLoCo(DiLoCo):
    """DiLoCo in which a fragment of the layers meets, and is applied some steps later.

        local = StreamingDiLoCo(model, group, inner, every=30, fragments=3, tau=5)
        for x, y in batches:
            loss(x, y).backward()                  # my share, divided by the whole batch
            local.step()
            local.zero_grad()
        weights = local.state()                    # the common ones; each rank's own differ

    fragments, tau, alpha   n, tau from 0 to h // n, alpha from 0 (x alone) to 1
    bits       4, or None for all bits
    start      x, one array per flat slice
    apart      the group of the second thread, in which fragments meet
    under_way  the fragment that has been sent and not applied; `came` is its D once it is there
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        inner: optim.Optimizer,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        tau: int = 0,
        alpha: float = 0.5,
        bits: int | None = 4,
    ):
        super().__init__(model, group, inner, every, lr, momentum)
        allowed = f"fragments are 1 to {every}: one begins in a step"
        check_number(allowed, fragments, lambda n: n in range(1, every + 1))
        last = every // fragments
        allowed = f"tau is 0 to {last} steps: a fragment is applied before the next one is sent"
        check_number(allowed, tau, lambda n: n in range(last + 1))
        check_number("alpha is a number from 0 to 1", alpha, lambda x: 0 <= x <= 1)
        if bits not in (4, None):
            raise WrongInput(f"bits are 4, or None for all, not {bits!r}")
        self.every, self.fragments, self.tau, self.alpha = every, fragments, tau, alpha
        self.bits, self.begun = bits, False
        self.under_way: int | None = None
        self.apart = group.split(0)
        self.beside = self.apart.beside(self.add_up, "fragment")
        self.came: list[Array] = []

    def step(self) -> None:
        """Take a step of the inner optimizer; apply a fragment, and send one, if it is time to."""
        if self.rounds.weights.behind() or not self.begun:
            self.begin()
        self.inner.step()
        self.rounds.ends()
        if self.under_way is not None and self.is_due(self.under_way, self.tau):
            self.apply()
        for fragment in range(self.fragments):
            if self.is_due(fragment):
                self.send(fragment)
                if self.tau == 0:
                    self.apply()
        self.rounds.weights.follow()

    def begin(self) -> None:
        """Begin with the weights as they are, the same on all ranks; drop what is under way."""
        self.rounds.begins()
        self.end()
        self.begun, self.under_way = True, None
        for s, start in zip(self.inner.slices, self.start, strict=True):
            start[...] = s.data

    def is_due(self, fragment: int, later: int = 0) -> bool:
        """Return whether a fragment is sent after this step, or was `later` steps ago."""
        first = (fragment + 1) * self.every // self.fragments
        return (self.rounds.steps - first - later) % self.every == 0

    def of_fragment(self) -> list[int]:
        """Return the numbers of the flat slices of the fragment that is under way."""
        layers = [self.inner.homes.index(s.home) for s in self.inner.slices]
        return [i for i, layer in enumerate(layers) if layer % self.fragments == self.under_way]

    def send(self, fragment: int) -> None:
        """Let the second thread add up what the ranks have moved a fragment by."""
        self.under_way = fragment
        self.moved = [self.start[i] - self.inner.slices[i].data for i in self.of_fragment()]
        self.came = [array_module(x).empty_like(x) for x in self.moved]  # by this thread's stream
        self.beside.put()
        self.beside.end()

    def add_up(self) -> None:
        """Write the mean of the ranks' x - x_r into `came`, per flat slice."""
        for x, place in zip(self.moved, self.came, strict=True):
            place[...] = self.mean(x)

    def mean(self, x: Array) -> Array:
        """Return the mean over the ranks of what they send of x[n]."""
        N = self.apart.size
        if self.bits is None:
            return self.apart.all_reduce(x / N, label="a fragment")
        codes, most = four_bits(x)
        codes = self.apart.all_gather(codes, label="codes of a fragment").reshape(N, -1)
        most = self.apart.all_gather(most, label="scales of a fragment")
        ranks = [from_four_bits(codes[r], most[r : r + 1], len(x)) / N for r in range(N)]
        return reduce_pieces(ranks, array_module(x).add)

    def apply(self) -> None:
        """Move the fragment's x along the mean; mix it into this rank's own weights."""
        self.end()
        for i, difference in zip(self.of_fragment(), self.came, strict=True):
            s, x, m = self.inner.slices[i], self.start[i], self.moments[i]
            m *= self.momentum
            m += difference
            x -= self.lr * (difference + self.momentum * m)
            s.data[...] = self.alpha * s.data + (1 - self.alpha) * x
            s.home.changed()
        self.under_way, self.came = None, []

    def end(self) -> None:
        """Wait for what is under way."""
        self.beside.wait("a fragment")

    def state(self) -> dict[str, Array]:
        """Return the common weights by name, once nothing is under way: those loaded since."""
        self.end()
        weights = self.rounds.model.state()
        if self.begun and not self.rounds.weights.behind():
            for s, x in zip(self.inner.slices, self.start, strict=True):
                weights |= {p.name: host_copy(x[at].reshape(p.shape)) for p, at in s.parts.items()}
        return weights
