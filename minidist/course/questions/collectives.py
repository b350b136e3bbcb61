"""What the collectives lab asks. The right answer is what the package itself answers.

A reduction may begin at another chunk and an exchange may go the other way around: the numbers, the
bytes of all ranks together and the steps are the package's, not what each rank sends to whom.
"""

from functools import partial
from math import ceil

import numpy as np

from minidist.course.probes import collectives as probes
from minidist.course.question import Answer, Question, Questions, Random
from minidist.course.questions.arrays import ask, by_rank, like_the_package
from minidist.errors import plural

exactly = partial(like_the_package, bound=0.0)


# 2.1


def star(rng: Random) -> Questions:
    for size in (1, 2, int(rng.integers(3, 6))):
        root = int(rng.integers(size))
        pieces = [rng.standard_normal((int(rng.integers(0, 4)), 2)) for _ in range(size)]
        about = f"{plural(size, 'rank')}, root {root}, pieces of {[len(p) for p in pieces]} rows"
        yield ask(about, probes.star, exactly, root=root, pieces=pieces)
    for op in ("add", "subtract", "maximum"):
        yield in_rank_order(op, rng.standard_normal((int(rng.integers(1, 5)), 3)))
    tiny = rng.uniform(0.1, 0.4)  # beside 1e16 it is rounded away
    yield in_rank_order("add", np.array([[1e16], [-1e16], [tiny], [tiny]]))


def in_rank_order(op: str, pieces: np.ndarray) -> Question:
    about = f"{plural(len(pieces), 'piece')}, np.{op}, in rank order"
    return ask(about, probes.reduce_pieces, exactly, op=op, pieces=list(pieces))


# 2.2


def all_to_all(rng: Random) -> Questions:
    for size in (1, 2, int(rng.choice([3, 5])), 4):
        lengths = rng.integers(0, 4, (size, size))
        pieces = [[rng.standard_normal(n) for n in row] for row in lengths]
        about = f"{plural(size, 'rank')}, pieces of {lengths.tolist()}"
        yield ask(about, probes.all_to_all, one_sender_each, pieces=pieces)


def one_sender_each(answer: Answer, want: Answer) -> str | None:
    """Judge an exchange: in each step a rank gets at most one piece, whatever the order."""
    if wrong := exactly(answer, want, free=("receivers",)):
        return wrong
    for step, receivers in enumerate(np.transpose(by_rank(answer, "receivers")).tolist(), 1):
        for r in set(receivers):
            senders = [s for s, receiver in enumerate(receivers) if receiver == r]
            if len(senders) > 1:
                return f"in step {step} ranks {senders} all send to rank {r}; one should"
    return None


# 2.3 to 2.5


def all_reduce(algorithm: str, op: str, arrays: list[np.ndarray]) -> Question:
    """Ask for a reduction: its values, the same bits everywhere, its bytes and steps."""
    N, x = len(arrays), arrays[0]
    most = 2 * (N - 1) * ceil(x.size / N) * x.itemsize if algorithm != "tree" else None
    judge = partial(the_same_bits_everywhere, most=most)
    about = f"{plural(N, 'rank')}, {plural(x.size, 'element')} of {x.dtype}, np.{op}"
    return ask(about, probes.all_reduce, judge, algorithm=algorithm, op=op, arrays=arrays)


def the_same_bits_everywhere(answer: Answer, want: Answer, most: int | None) -> str | None:
    """Judge a reduction; most: the bytes of N - 1 chunks in each half, which a rank may send."""
    if wrong := like_the_package(answer, want, free=("steps",)):
        return wrong
    sums = by_rank(answer, "x")
    for r, x in enumerate(sums):
        if not np.array_equal(x, sums[0]):
            return f"rank {r} has other bits than rank 0: each chunk is finished at one place"
    for r, moved in enumerate(by_rank(answer, "bytes")):
        if most is not None and moved > most:
            chunks = "each rank gives away N - 1 chunks in each half"
            return f"rank {r} sent {moved} bytes, more than {most}: {chunks}"
    took, least = (max(by_rank(numbers, "steps")) for numbers in (answer, want))
    return f"it took {took} steps, not {least}" if took > least else None


def reductions(rng: Random, algorithm: str, sizes: list[int]) -> Questions:
    """Ask for small and uneven arrays, an empty one, and another operation than the sum."""
    for N in sizes:
        n = int(rng.integers(1, 4)) * N  # N divides it
        uneven = n + int(rng.integers(1, max(2, N)))
        other = str(rng.choice(["maximum", "minimum"]))
        for count, op in ((n, "add"), (uneven, "add"), (uneven, other)):
            yield all_reduce(algorithm, op, [rng.standard_normal(count) for _ in range(N)])
    N = sizes[-1]
    for n in (int(rng.integers(1, N)), 0):  # fewer elements than ranks
        yield all_reduce(
            algorithm, "add", [rng.integers(-9, 10, n).astype(np.int32) for _ in range(N)]
        )


def ring(rng: Random) -> Questions:
    yield from reductions(rng, "ring", [1, 2, 3, int(rng.integers(4, 7))])


def tree(rng: Random) -> Questions:
    sizes = [1, 2, int(rng.choice([3, 5])), int(rng.choice([6, 7])), 8]
    yield from reductions(rng, "tree", sizes)


def halving_doubling(rng: Random) -> Questions:
    yield from reductions(rng, "halving_doubling", [1, 2, 4, 8])
    for N in (3, int(rng.choice([5, 6, 7]))):
        about = f"{N} ranks, which it cannot serve"
        yield ask(about, probes.refusal, algorithm="halving_doubling", size=N)


QUESTIONS = {
    "2.1": star,
    "2.2": all_to_all,
    "2.3": ring,
    "2.4": tree,
    "2.5": halving_doubling,
}
