"""Programs: a list of actions per rank, and the virtual stages that each rank holds.

Virtual stage k is on rank k mod p, as in interleaved 1F1B (Narayanan et al. 2021, section 2.2), or
where the schedule says: zb_v lays two chunks per rank out as a V.
"""

from collections.abc import Iterable
from itertools import chain
from zlib import crc32

from minidist.errors import WrongInput
from minidist.pieces import split_sizes
from minidist.pipeline_parallel.actions import Action, Reduce, Transfer, Update

Pair = tuple[int, Action, Action]  # (rank, forward, backward)
MOST_STAGES = 1_000_000  # that a placement has by default


class Programs(list):
    """One list of actions per rank.

    placement  placement[r][c] is the virtual stage that rank r holds as its chunk c. By default
               virtual stage k is on rank k mod p. Several ranks may hold the same stage: they are
               its replicas, and each takes some of the micro-batches.
    pairs      {(rank, forward, backward)}: neighbours in a rank's program that may overlap, as in
               DualPipe. Our ranks have one stream and run the forward first; `write` keeps pairs.

    TypeError if a rank's program is None, for example because a schedule forgot its `return`.
    """

    def __init__(
        self,
        programs,
        placement: list[list[int]] | None = None,
        pairs: Iterable[Pair] = (),
    ):
        super().__init__()
        for rank, program in enumerate(programs):
            if program is None:
                raise TypeError(
                    f"the program of rank {rank} is None, not a list of actions; "
                    "does the schedule return it?"
                )
            self.append(list(program))
        self.placement = placement or placement_of(self[:])
        self.pairs = frozenset(pairs)


def looped(p: int, chunks: int = 1) -> list[list[int]]:
    """Return the placement in which virtual stage k is on rank k mod p."""
    return [[c * p + r for c in range(chunks)] for r in range(p)]


def placement_of(programs: list[list[Action]]) -> list[list[int]]:
    if isinstance(programs, Programs):
        return programs.placement
    own = [a.chunk for program in programs for a in program if isinstance(a, Action)]
    chunks = 1 + max(own, default=0)
    if len(programs) * chunks > MOST_STAGES:
        raise WrongInput(f"chunk {chunks - 1} would be of more than {MOST_STAGES} stages")
    return looped(len(programs), chunks)


def pairs_of(programs: list[list[Action]]) -> frozenset[Pair]:
    return programs.pairs if isinstance(programs, Programs) else frozenset()


def last_stage(placement: list[list[int]]) -> int:
    if not any(placement):
        raise WrongInput("there is no program for any rank, so there are no stages")
    return max(k for stages in placement for k in stages)


def micro_batches_of(programs: list[list[Action]]) -> int:
    """Return the number of micro-batches that these programs name."""
    numbers = [a.micro_batch for program in programs for a in program if isinstance(a, Action)]
    return 1 + max(numbers, default=-1)


def digest(programs: list[list[Action]]) -> str:
    """Return some letters that differ for different programs, the same on every machine."""
    return f"{crc32(repr((list(programs), placement_of(programs))).encode()):08x}"


def kinds_of(programs: list[list[Action]]) -> set[type]:
    return set(map(type, chain.from_iterable(programs)))


def updates(programs: list[list[Action]]) -> bool:
    """Return whether these programs update the weights themselves, that is, are asynchronous."""
    return Update in kinds_of(programs)


def reduces(programs: list[list[Action]]) -> bool:
    """Return whether gradients are summed inside these programs."""
    return Reduce in kinds_of(programs)


def communicates(programs: list[list[Action]]) -> bool:
    """Return whether the transfers of these programs have been added."""
    return any(issubclass(kind, Transfer) for kind in kinds_of(programs))


def equal_lengths(n: int, p: int) -> list[int]:
    """Return the lengths of p stages of n layers, as equal as can be: the first are the shorter."""
    check_lengths(n, p)
    return split_sizes(n, p)[::-1]


def check_lengths(n: int, p: int) -> None:
    """Raise ValueError if n layers do not make p stages, none of them empty."""
    if p < 1:
        raise WrongInput(f"cannot cut layers into {p} stages; use 1 or more")
    if p > n:
        raise WrongInput(f"cannot cut {n} layers into {p} stages; use at most {n}")
