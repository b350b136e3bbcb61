"""What the collectives lab asks, and what the answers must be."""

from collections.abc import Iterator
from functools import reduce
from math import ceil, log2

import numpy as np

from minidist.comm.collectives import split_sizes
from minidist.course.question import Answer, Question, counted, expect
from minidist.course.questions.arrays import Causes, differ, first

Questions = Iterator[Question]
Random = np.random.Generator


def sent(answer: Answer, rank: int, which: str = "sent") -> int:
    return int(answer[f"{which} {rank}"][:, 1].sum())


# 2.1


def star(rng: Random) -> Questions:
    for size in (1, 2, int(rng.integers(3, 6))):
        root = int(rng.integers(size))
        shapes = [(int(rng.integers(0, 4)), 2) for _ in range(size)]
        yield from_and_to_root(root, [rng.standard_normal(shape) for shape in shapes])
    for op in ("add", "subtract", "maximum"):
        yield in_rank_order(op, rng.standard_normal((int(rng.integers(1, 5)), 3)))
    tiny = rng.uniform(0.1, 0.4)  # beside 1e16 it is rounded away
    yield in_rank_order("add", np.array([[1e16], [-1e16], [tiny], [tiny]]))


def from_and_to_root(root: int, pieces: list[np.ndarray]) -> Question:
    sizes = [p.nbytes for p in pieces]

    def judge(answer: Answer) -> str | None:
        for r, piece in enumerate(pieces):
            if wrong := expect(answer, {f"given {r}": piece}):
                return f"from_root: rank {r} did not get pieces[{r}]: {wrong}"
            if bool(answer[f"is none {r}"]) != (r != root):
                return f"to_root: rank {r} gets {'None' if r == root else 'a list'}; root is {root}"
            if answer[f"shared {r}"]:
                return f"rank {r} gets an array that the caller still owns; copy the root's own"
            down = sum(sizes) - sizes[root] if r == root else 0
            up = 0 if r == root else sizes[r]
            for way, want in (("from_root", down), ("to_root", up)):
                got = sent(answer, r, "down sent" if way == "from_root" else "up sent")
                if got != want:
                    return f"{way}: rank {r} sent {got} bytes, not {want}"
        names = [f"found from {s} on {root}" for s in range(len(pieces))]
        return expect(answer, dict(zip(names, pieces, strict=True)))

    about = f"{counted(len(pieces), 'rank')}, root {root}, "
    about += f"pieces of {[len(p) for p in pieces]} rows"
    return Question(about, "star", {"root": root, "pieces": pieces}, judge)


def in_rank_order(op: str, pieces: np.ndarray) -> Question:
    pieces = list(pieces)

    def judge(answer: Answer) -> str | None:
        if not answer["into the first"]:
            return "the result is another array than the first piece"
        want = reduce(getattr(np, op), pieces)
        backwards = reduce(getattr(np, op), pieces[::-1])
        if np.array_equal(answer["result"], backwards) and not np.array_equal(want, backwards):
            return "the pieces were reduced last rank first; the order is rank 0, 1, 2, ..."
        return expect(answer, {"result": want})

    given = {"op": op, "pieces": pieces}
    about = f"{counted(len(pieces), 'piece')}, np.{op}, in rank order"
    return Question(about, "reduce_pieces", given, judge)


# 2.2


def all_to_all(rng: Random) -> Questions:
    for size in (1, 2, int(rng.choice([3, 5])), 4):
        lengths = rng.integers(0, 4, (size, size))
        yield exchange([[rng.standard_normal(n) for n in row] for row in lengths])


def exchange(pieces: list[list[np.ndarray]]) -> Question:
    N = len(pieces)

    def judge(answer: Answer) -> str | None:
        for r in range(N):
            for s in range(N):
                want, got = pieces[s][r], answer.get(f"from {s} on {r}")
                if got is not None and np.array_equal(got, want):
                    continue
                for t in range(N):
                    if len(want) and got is not None and np.array_equal(got, pieces[t][r]):
                        return f"rank {r} has rank {t}'s piece at place {s}: not in rank order"
                return f"rank {r} has not at place {s} what rank {s} has given it"
            if answer[f"own shared {r}"]:
                return f"rank {r}'s own piece is not a copy; results are fresh arrays"
            got, want = sent(answer, r), sum(p.nbytes for p in pieces[r]) - pieces[r][r].nbytes
            if got != want:
                return f"rank {r} sent {got} bytes, not {want}: each piece once, none to itself"
        ways = [answer[f"sent {r}"][:, 0].tolist() for r in range(N)]
        for step in range(N - 1):
            targets = [way[step] for way in ways]
            for r in set(targets):
                senders = [s for s, target in enumerate(targets) if target == r]
                if len(senders) > 1:
                    return f"in step {step + 1} ranks {senders} all send to rank {r}; one should"
        return None

    about = f"{counted(N, 'rank')}, pieces of {[[len(p) for p in row] for row in pieces]}"
    return Question(about, "all_to_all", {"pieces": pieces}, judge)


# 2.3 to 2.5


def all_reduce(algorithm: str, op: str, arrays: list[np.ndarray], steps: int) -> Question:
    """Ask for a reduction: its values, the same bits everywhere, its bytes and steps."""
    N, n, itemsize = len(arrays), arrays[0].size, arrays[0].itemsize
    S = n * itemsize

    def judge(answer: Answer) -> str | None:
        want, causes = reduce(getattr(np, op), arrays), mistakes(arrays, op)
        for r in range(N):
            mine = {"x untouched: the array is reduced in place": arrays[r]} if N > 1 else {}
            if wrong := differ(f"x {r}", answer, want, mine | causes):
                return f"rank {r}: {wrong}{where(wrong, r, answer, want)}"
        for r in range(1, N):
            if not np.array_equal(answer[f"x {r}"], answer["x 0"]):
                return f"rank {r} has other bits than rank 0: each chunk is finished at one place"
        return bytes_moved(answer) or steps_taken(answer)

    def where(wrong: str, r: int, answer: Answer, want: np.ndarray) -> str:
        """Return which elements are wrong, as chunks."""
        got = answer.get(f"x {r}")
        if got is None or got.shape != want.shape:
            return ""
        chunks, start = [], 0
        for c, size in enumerate(split_sizes(n, N)):
            if not np.allclose(got[start : start + size], want[start : start + size]):
                chunks.append(c)
            start += size
        return f" (chunks {chunks} of {N} are wrong)"

    def bytes_moved(answer: Answer) -> str | None:
        moved = [sent(answer, r) for r in range(N)]
        if sum(moved) != 2 * (N - 1) * S:
            causes = {N * (N - 1) * S: ": every rank's whole array goes to every other"}
            return (
                f"all ranks together sent {sum(moved)} bytes, not 2 (N - 1) S = {2 * (N - 1) * S}"
                + causes.get(sum(moved), "")
            )
        most = 2 * (N - 1) * -(-n // N) * itemsize
        for r in range(N) if algorithm != "tree" else []:
            if moved[r] > most:
                return (
                    f"rank {r} sent {moved[r]} bytes, more than {most}: "
                    "each rank gives away N - 1 chunks in each half"
                )
        return None

    def steps_taken(answer: Answer) -> str | None:
        took = max(int(answer[f"steps {r}"]) for r in range(N))
        return None if took <= steps else f"it took {took} steps, not {steps}"

    about = f"{counted(N, 'rank')}, {counted(n, 'element')} of {arrays[0].dtype}, np.{op}"
    given = {"algorithm": algorithm, "op": op, "arrays": arrays}
    return Question(about, "all_reduce", given, judge)


def mistakes(arrays: list[np.ndarray], op: str) -> Causes:
    N, total = len(arrays), reduce(np.add, arrays)
    if op != "add":
        return {f"it is the sum; `combine` was np.{op}": total} if N > 1 else {}
    return {
        "it is the mean: `combine` alone, no factor": total / N,
        **{f"rank {r}'s array was never added": total - arrays[r] for r in range(N) if N > 1},
        **{f"rank {r}'s array was added twice": total + arrays[r] for r in range(N) if N > 1},
    }


def reductions(rng: Random, algorithm: str, sizes: list[int], steps) -> Questions:
    """Ask for small and uneven arrays, an empty one, and another operation than the sum."""
    for N in sizes:
        n = int(rng.integers(1, 4)) * N  # N divides it
        uneven = n + int(rng.integers(1, N)) if N > 1 else n + 1
        for count, op in (
            (n, "add"),
            (uneven, "add"),
            (uneven, str(rng.choice(["maximum", "minimum"]))),
        ):
            arrays = [rng.standard_normal(count) for _ in range(N)]
            yield all_reduce(algorithm, op, arrays, steps(N))
    N = sizes[-1]
    for n in (int(rng.integers(1, N)), 0):  # fewer elements than ranks
        arrays = [rng.integers(-9, 10, n).astype(np.int32) for _ in range(N)]
        yield all_reduce(algorithm, "add", arrays, steps(N))


def ring(rng: Random) -> Questions:
    yield from reductions(rng, "ring", [1, 2, 3, int(rng.integers(4, 7))], lambda N: 2 * (N - 1))


def tree(rng: Random) -> Questions:
    sizes = [1, 2, int(rng.choice([3, 5])), int(rng.choice([6, 7])), 8]
    yield from reductions(rng, "tree", sizes, lambda N: 2 * ceil(log2(N)))


def halving_doubling(rng: Random) -> Questions:
    yield from reductions(rng, "halving_doubling", [1, 2, 4, 8], lambda N: 2 * round(log2(N)))
    for N in (3, int(rng.choice([5, 6, 7]))):

        def judge(answer, N=N):
            return first(
                f"rank {r} of {N} got no ValueError; halves pair up among 2, 4, 8, ... ranks only"
                for r in range(N)
                if not answer[f"refused {r}"]
            )

        given = {"algorithm": "halving_doubling", "size": N}
        yield Question(f"{N} ranks, which it cannot serve", "refusal", given, judge)


QUESTIONS = {
    "2.1": star,
    "2.2": all_to_all,
    "2.3": ring,
    "2.4": tree,
    "2.5": halving_doubling,
}
