"""What the collectives lab asks. The right answer is what the package itself answers.

A reduction may begin at another chunk and an exchange may go the other way around: the numbers, the
bytes of all ranks together and the steps are the package's, not what each rank sends to whom.
"""

from functools import partial

import numpy as np

from minidist.course.answers import Answer, by_rank, like_the_package
from minidist.course.labs.collectives import probes
from minidist.course.question import Questions, Random, ask, ints, ranks
from minidist.errors import plural

exactly = partial(like_the_package, bound=0.0)


def star(rng: Random) -> Questions:
    for N in (1, 2, int(rng.integers(3, 6))):
        root = int(rng.integers(N))
        pieces = [rng.standard_normal((n, 2)) for n in ints(rng, 0, 4, N)]
        about = f"{plural(N, 'rank')}, root {root}, pieces of {[len(p) for p in pieces]} rows"
        yield ask(about, probes.star, exactly, ranks(N), root=root, pieces=pieces)
    tiny = rng.uniform(0.1, 0.4)  # beside 1e16 it is rounded away
    drawn = [(op, rng.standard_normal((4, 3))) for op in ("add", "subtract", "maximum")]
    for op, x in [*drawn, ("add", np.array([[1e16], [-1e16], [tiny], [tiny]]))]:
        about = f"{plural(len(x), 'piece')}, np.{op}, in rank order"
        yield ask(about, probes.reduce_pieces, exactly, "in rank order", op=op, pieces=list(x))


def all_to_all(rng: Random) -> Questions:
    for N in (1, 2, int(rng.choice([3, 5])), 4):
        lengths = rng.integers(0, 4, (N, N))
        pieces = [[rng.standard_normal(n) for n in row] for row in lengths]
        about = f"{plural(N, 'rank')}, pieces of {lengths.tolist()}"
        yield ask(about, probes.all_to_all, one_sender_each, ranks(N), pieces=pieces)


def one_sender_each(answer: Answer, want: Answer) -> str | None:
    """Judge an exchange: in each step a rank gets one piece, whatever the order of the ranks."""
    wrong = exactly(answer, want, free=("receivers",))
    for step, receivers in enumerate(np.transpose(by_rank(answer, "receivers")).tolist(), 1):
        if len(set(receivers)) < len(receivers):
            wrong = wrong or f"in step {step} ranks 0, 1, ... send to {receivers}: two to one"
    return wrong


# All-reduce.


def the_same_bits_everywhere(answer: Answer, want: Answer) -> str | None:
    """Judge a reduction: no more steps and bytes than the package; all ranks have equal bits."""
    most = ("the number of steps", "what one rank sends")
    if wrong := like_the_package(answer, want, at_most=most):
        return wrong
    sums = by_rank(answer, "x")
    odd = [r for r, x in enumerate(sums) if not np.array_equal(x, sums[0])]
    why = "each chunk is finished at one place"
    return f"ranks {odd} have other bits than rank 0: {why}" if odd else None


def reductions(rng: Random, algorithm: str, sizes: list[int]) -> Questions:
    """Ask for small and uneven arrays, an empty one, and another operation than the sum."""
    asked = []
    for N in sizes:
        n = int(rng.integers(1, 4)) * N  # N divides it
        uneven, group = n + int(rng.integers(1, max(2, N))), ranks(N)
        other = str(rng.choice(["maximum", "minimum"]))
        for count, op in ((n, "add"), (uneven, "add"), (uneven, other)):
            asked.append((group, op, list(rng.standard_normal((N, count)))))
    N = sizes[-1]
    for n in (int(rng.integers(1, N)), 0):
        few = list(rng.integers(-9, 10, (N, n)).astype(np.int32))
        asked.append(("fewer elements than ranks", "add", few))
    for group, op, arrays in asked:
        x = arrays[0]
        about = f"{plural(len(arrays), 'rank')}, {plural(x.size, 'element')} of {x.dtype}, np.{op}"
        given = {"algorithm": algorithm, "op": op, "arrays": arrays}
        yield ask(about, probes.all_reduce, the_same_bits_everywhere, group, **given)


def ring(rng: Random) -> Questions:
    yield from reductions(rng, "ring", [1, 2, 3, int(rng.integers(4, 7))])


def tree(rng: Random) -> Questions:
    sizes = [1, 2, int(rng.choice([3, 5])), int(rng.choice([6, 7])), 8]
    yield from reductions(rng, "tree", sizes)


def halving_doubling(rng: Random) -> Questions:
    yield from reductions(rng, "halving_doubling", [1, 2, 4, 8])
    for N in (3, int(rng.choice([5, 6, 7]))):
        given = {"algorithm": "halving_doubling", "size": N}
        yield ask(f"{N} ranks, which it cannot serve", probes.refusal, group=ranks(N), **given)


QUESTIONS = {"2.1": star, "2.2": all_to_all, "2.3": ring, "2.4": tree, "2.5": halving_doubling}
