"""Gradients that are sent in part, and what is left out is remembered: error feedback.

Letters: g a rank's gradient of one parameter, n elements; e what this rank still owes; C what it
sends; N ranks. In every step, on every rank and for every parameter,

    v = g + e,    send C(v),    e' = v - C(v),        so        e' + C(v) = v:

nothing is lost, only late. (Karimireddy et al. 2019, Error Feedback Fixes SignSGD, algorithm 2;
the idea is in Seide et al. 2014, 1-bit SGD.) Every rank adds up, in rank order, what all have sent.
What is remembered has no loss scale, and a skipped step does not change it (`Memory`).

    TopK   the k elements largest in size           Stich, Cordonnier, Jaggi 2018, algorithm 1
    Sign   one bit per element, and the mean size   Karimireddy et al. 2019, algorithm 1
    Int8   127 levels, rounded at random            Alistarh et al. 2017 (QSGD), sections 3.1, 4
    PowerSGD (power_sgd.py)   two thin matrices     Vogels, Karimireddy, Jaggi 2019

The first two papers remember lr v, not v: the same where lr does not change.

The arithmetic. e, v and C are float64, whatever the gradient is, and e' + C(v) == v holds without
any rounding. For TopK this costs nothing: C(v) is 0, or v rounded to the gradient's dtype, and
float64 has room for what the rounding leaves. For the others v - C(v) would need more than 53 bits
where v is much smaller than C(v). So v and C are first rounded to multiples of one number, between
2^-52 and 2^-49 of the largest of them (`on_grid`); their differences then fit 53 bits. What is
rounded are sums, as everywhere: g + e, and the sum over the ranks, to the gradient's dtype.

Layouts, as in naive.py: X[B/dp, ...] -> dW{+dp} -> the same dW on every rank. The memory e is a
partial sum: all ranks' e together are what the weights have not yet got. Bytes of all N ranks:

    TopK    N (N - 1) k (itemsize + 4)    values, and where they belong, uint32
    Sign    N (N - 1) (ceil(n / 8) + 8)   packed bits, and a float64
    Int8    N (N - 1) (n + 8)             levels, and a float64

An all_gather has N (N - 1) where the all_reduce of naive.py has 2 (N - 1): what has been compressed
cannot be added up on the way. So the more ranks there are, the more must be left out.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from minidist.autograd.recording import Since
from minidist.backend import Array, array_module, mean_over
from minidist.comm import Group
from minidist.comm.collectives import reduce_pieces
from minidist.errors import check_number
from minidist.nn import Module, Parameter
from minidist.nn.parameter import Scale
from minidist.parallel import check_replicas, check_same_weights, summed_ranks
from minidist.rng import digest, hash_uniform

LEVELS = 127  # of Int8, on each side of 0


class Sent(NamedTuple):
    """What a compressor has done with v on this rank; arrays of the parameter's shape.

    total  the sum over the ranks of what they have sent, in the gradient's dtype
    v      this rank's v, float64, as it was compressed
    own    C(v), float64: what this rank has sent. v - own is exact
    """

    total: Array
    v: Array
    own: Array


Compressor = Callable[[Array, Parameter, Group, int], Sent]  # (v, parameter, group, step)


class ErrorFeedback:
    """Sum a model's gradients over the ranks, compressed; add what was left out to the next ones.

        feedback = ErrorFeedback(model, group, TopK(share=0.01))
        loss(x, y).backward()
        feedback.all_reduce_gradients()           # every rank, once per step, also with no batch

    errors  {name: e}, float64, without a loss scale; a parameter without an entry owes nothing.
            load_state empties it, also where it swaps other weights in for an evaluation
    steps   number of steps so far, without those that were skipped
    """

    def __init__(self, model: Module, group: Group, compress: Compressor):
        check_replicas(model, group)
        self.model, self.group, self.compress = model, group, compress
        self.memory = Memory(model, group, {}, getattr(compress, "q", {}))

    @property
    def errors(self) -> dict[str, Array]:
        self.memory.settle()
        return self.memory.kept[0]

    @property
    def steps(self) -> int:
        self.memory.settle()
        return self.memory.steps

    def all_reduce_gradients(self) -> None:
        """Give every rank the sum of what all ranks send of their gradients; None adds zero.

        A sum that is not finite is left in `p.grad`, for the caller to skip the step; what is
        remembered is then what it was before.
        """
        scale, errors = self.memory.begin(), self.errors
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for p in trained:
            ranks = summed_ranks(p, self.group)
            grad = p.xp.zeros_like(p.data) if p.grad is None else p.grad
            v = grad.astype("float64") + scale * errors.get(p.name, 0.0)
            sent = self.compress(v, p, self.group, self.steps)
            errors[p.name] = (sent.v - sent.own) / scale
            p.grad, p.summed_over = sent.total, ranks
        self.memory.end(p.grad for p in trained)


class Memory:
    """Arrays by name that a step replaces and never writes into, and the number of steps.

    unscaled  MixedPrecision multiplies gradients by a scale that changes; what is remembered is
              divided by it
    skipped   a step whose sums are not finite, or that MixedPrecision skips because any rank's
              are not, leaves everything as it was
    loaded    weights that load_state has replaced are owed nothing: all is forgotten

    kept        dictionaries, which others read and write; here they are only taken back or emptied
    steps       number of steps so far that were not skipped, since the weights were loaded
    before      steps and dictionaries before the last step, while it may still be skipped
    last_scale  the LossScale of the last step, or None; the step was skipped if this now counts
                more skipped steps than `skipped`
    """

    def __init__(self, model: Module, group: Group, *kept: dict[str, Array]):
        self.model, self.group = model, group
        self.kept: tuple[dict[str, Array], ...] = kept
        self.parameters = model.parameters()
        self.steps, self.skipped, self.ended = 0, 0, True
        self.weights = Since(self.last_replaced)
        self.before: tuple[int, list[dict]] | None = None
        self.last_scale: Scale | None = None

    @property
    def scale(self) -> Scale | None:
        """The LossScale of the gradients, if MixedPrecision updates the parameters, or None."""
        return next((p.home.scale for p in self.parameters if p.home and p.home.scale), None)

    def begin(self) -> float:
        """Begin a step from what is right to remember; return what multiplies its gradients."""
        if not self.ended:
            self.undo()
        self.follow()
        self.settle()
        self.ended = False
        self.before = self.steps, [dict(memory) for memory in self.kept]
        self.last_scale = scale = self.scale
        self.skipped = 0 if scale is None else scale.skipped
        return 1.0 if scale is None else scale.value

    def end(self, sums: Iterable[Array]) -> None:
        """End a step with these sums of gradients, the same on every rank."""
        self.steps, self.ended = self.steps + 1, True
        if not all(bool(array_module(x).isfinite(x).all()) for x in sums):
            self.undo()
        elif self.last_scale is None:
            self.before = None

    def last_replaced(self) -> int:
        return max((p.replaced for p in self.parameters), default=0)

    def settle(self) -> None:
        """Take the last step back if it was skipped."""
        scale = self.last_scale
        if self.before is not None and scale and scale.skipped > self.skipped:
            self.undo()

    def undo(self) -> None:
        """Remember what was remembered before the last step."""
        assert self.before is not None
        (self.steps, before), self.before = self.before, None
        for memory, old in zip(self.kept, before, strict=True):
            memory.clear()
            memory.update(old)

    def follow(self) -> None:
        """Forget all if the weights were loaded since; ValueError unless all ranks loaded them."""
        if self.weights.behind():
            check_same_weights(self.model, self.group)
            self.weights.follow()
            self.steps, self.before = 0, None
            for memory in self.kept:
                memory.clear()


def on_grid(*arrays: Array) -> list[Array]:
    """Round float64 arrays to multiples of one u, so that their differences are exact.

    Let max be the largest |x| of all. Between 3 max and 5 max the numbers of float64 are multiples
    of u > 2^-52 max. Add 4 max, and x is rounded to such a multiple, by 2^-50 max at most; subtract
    4 max, and that is exact (Sterbenz's lemma). Differences are below 2^53 u, so they fit 53 bits.
    """
    xp = array_module(*arrays)
    most = abs(arrays[0]).max()
    for x in arrays[1:]:
        most = xp.maximum(most, abs(x).max())
    return [(x + 4 * most) - 4 * most for x in arrays]


class TopK:
    """Send the k = share n elements of v that are largest in size, and where they are.

    share  of each parameter's elements, above 0 and up to 1: then nothing is left out
    """

    def __init__(self, share: float):
        check_number("share is a number above 0 and up to 1", share, lambda x: 0 < x <= 1)
        self.share = share

    def __call__(self, v: Array, p: Parameter, group: Group, step: int) -> Sent:
        xp, flat = array_module(v), v.reshape(-1)
        k = max(1, int(self.share * flat.size))
        sparse = xp.zeros_like(flat)  # C(v)
        places = xp.argpartition(abs(flat), flat.size - k)[flat.size - k :].astype("uint32")
        values = flat[places].astype(p.dtype)
        sparse[places] = values
        every_place = group.all_gather(places, label=f"{p.name}: places")
        every_value = group.all_gather(values, label=f"{p.name}: values")
        total = xp.zeros(flat.size, p.dtype)
        for r in range(group.size):  # a rank's places are all different; two ranks' may not be
            theirs = slice(r * k, (r + 1) * k)
            total[every_place[theirs]] += every_value[theirs]
        return Sent(total.reshape(p.shape), v, sparse.reshape(p.shape))


class Sign:
    """Send a bit per element, whether v < 0, and the mean of |v|: C(v) = mean |v| sign v."""

    def __call__(self, v: Array, p: Parameter, group: Group, step: int) -> Sent:
        xp, flat = array_module(v), v.reshape(-1)
        flat, scale = on_grid(flat, mean_over(abs(flat)).reshape(1))
        bits = xp.packbits(flat < 0)
        scales = group.all_gather(scale, label=f"{p.name}: scales")
        packed = group.all_gather(bits, label=f"{p.name}: bits").reshape(group.size, -1)

        def decoded(bits: Array, scale: Array) -> Array:
            return xp.where(xp.unpackbits(bits)[: flat.size] == 1, -scale, scale)

        ranks = [decoded(packed[r], scales[r : r + 1]) for r in range(group.size)]
        total = reduce_pieces([ranks[0].copy(), *ranks[1:]], xp.add).astype(p.dtype)
        return Sent(*(x.reshape(p.shape) for x in (total, flat, ranks[group.rank])))


def random_levels(x: Array, level: Array, draws: Array) -> Array:
    """Return x / level as whole numbers, int8, right in the mean: rounded down or up at random.

    A size |x| / level is rounded up if its fraction and the draw together are 1 or more.

    x      [n], float64, of both signs
    level  [1], the distance of two levels; 0 only if every x is 0, and then all numbers are 0
    draws  [n], uniform in [0, 1); no size becomes more than LEVELS
    """
    xp = array_module(x)
    sizes = abs(x) / xp.where(level > 0, level, 1.0) + draws
    sizes = xp.minimum(sizes, LEVELS).astype("int8")  # a cast to integers rounds down
    return xp.where(x < 0, -sizes, sizes)


class Int8:
    """Send an int8 per element and the largest |v| over 127: C(v) = level x that.

    v is rounded to the level below or above, with probabilities that make the mean of C(v) equal v.
    QSGD divides by the norm in its theory, by the largest element in practice. It needs no memory,
    because errors of mean 0 cancel out; here they are remembered, too. They are below one level.

    seed  the draws are a hash of (seed, step, rank, parameter, element)
    """

    def __init__(self, seed: int = 0):
        self.seed = seed

    def __call__(self, v: Array, p: Parameter, group: Group, step: int) -> Sent:
        xp, flat = array_module(v), v.reshape(-1)
        flat, level = on_grid(flat, (abs(flat).max() / LEVELS).reshape(1))
        key = digest(self.seed, step, group.rank, p.name)
        draws = hash_uniform(key, xp.arange(flat.size, dtype="uint64"))
        numbers = random_levels(flat, level, draws)
        scales = group.all_gather(level, label=f"{p.name}: scales")
        numbers = group.all_gather(numbers, label=f"{p.name}: levels").reshape(group.size, -1)
        ranks = [numbers[r].astype("float64") * scales[r : r + 1] for r in range(group.size)]
        total = reduce_pieces([ranks[0].copy(), *ranks[1:]], xp.add).astype(p.dtype)
        return Sent(*(x.reshape(p.shape) for x in (total, flat, ranks[group.rank])))
