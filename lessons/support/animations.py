"""Three pictures that move: a ring all_reduce, 1F1B filling up, the cuts of a causal sequence.

    cd lessons && python -m support.animations ../figures/moving

Each is one SVG file without a script: everything that is drawn has a time at which it appears and
one at which it goes, in steps. Who has asked for less motion sees the last step.
"""

import sys
from pathlib import Path

from minidist.observe.style import BACKWARD, COMMUNICATION, FORWARD, INK, OWN, ROW
from minidist.pipeline_parallel import programs
from minidist.planning import simulate

RANKS = FORWARD, BACKWARD, COMMUNICATION, OWN


class Movie:
    """A drawing of `steps` steps of `seconds` each, over and over."""

    def __init__(self, width: int, height: int, steps: int, seconds: float, title: str):
        self.size, self.steps, self.seconds, self.title = (width, height), steps, seconds, title
        self.parts: list[str] = []

    def add(self, shape: str, begin: int = 0, end: int | None = None) -> None:
        """Draw a shape in the steps from `begin` to before `end`, by default to the last one."""
        end = self.steps if end is None else end
        whole = begin == 0 and end == self.steps
        self.parts.append(shape if whole else f'<g class="s{begin}_{end}">{shape}</g>')

    def box(self, x, y, width, height, color: str, begin: int = 0, end: int | None = None) -> None:
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.add(f'<rect {place} fill="{color}" stroke="white"/>', begin, end)

    def text(self, x, y, words, begin: int = 0, end: int | None = None, color: str = INK) -> None:
        self.add(f'<text x="{x}" y="{y}" fill="{color}">{words}</text>', begin, end)

    def svg(self) -> str:
        width, height = self.size
        spans = sorted({part.split('"')[1] for part in self.parts if part.startswith("<g class")})
        rules = "".join(self._rules(*map(int, span[1:].split("_"))) for span in spans)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
            f"<title>{self.title}</title><style>text{{font:13px sans-serif;text-anchor:middle}}"
            f"{rules}</style><rect width='{width}' height='{height}' fill='white'/>"
            + "".join(self.parts)
            + "</svg>\n"
        )

    def _rules(self, begin: int, end: int) -> str:
        name, (first, last) = f"s{begin}_{end}", (100 * t / self.steps for t in (begin, end))
        hidden, shown = "{visibility:hidden}", "{visibility:visible}"
        frames = f"0%{hidden}{first:.3f}%{shown}{last:.3f}%{hidden if end < self.steps else shown}"
        still = shown if end == self.steps else hidden
        return (
            f"@keyframes {name}{{{frames}}}"
            f".{name}{{animation:{name} {self.steps * self.seconds:g}s step-end infinite}}"
            f"@media(prefers-reduced-motion:reduce){{.{name}{{animation:none;{still[1:-1]}}}}}"
        )


def ring(N: int = 4) -> Movie:
    """The pieces of four ranks' arrays go round: in a cell, how many ranks' parts it sums."""
    movie = Movie(640, 300, 2 * N + 1, 1.2, "A ring all_reduce of four ranks, hop by hop")
    shades = ["#dceefa", "#a9d6f2", OWN, FORWARD]
    sums = [[1] * N for _ in range(N)]  # [rank][piece]
    for step in range(2 * N + 1):
        hop = min(step, 2 * (N - 1))
        before = [row[:] for row in sums]
        arrives = {rank: (rank - hop) % N for rank in range(N)} if 0 < step <= 2 * (N - 1) else {}
        for (
            rank,
            piece,
        ) in arrives.items():  # to be added in the first half, to be kept in the second
            own = before[rank][piece] if hop < N else 0
            sums[rank][piece] = before[(rank - 1) % N][piece] + own
        for rank in range(N):
            x = 60 + 140 * rank
            movie.text(x + 45, 40, f"rank {rank}", step, step + 1)
            for piece in range(N):
                y, n = 55 + 45 * piece, sums[rank][piece]
                movie.box(x, y, 90, 40, shades[n - 1], step, step + 1)
                movie.text(x + 45, y + 25, n, step, step + 1, "white" if n > 2 else INK)
                if arrives.get(rank) == piece:
                    movie.text(x - 25, y + 25, "&#10142;", step, step + 1, BACKWARD)
        part = "reduce_scatter" if hop < N else "all_gather"
        words = f"hop {hop} of {2 * N - 2} ({part}): each rank has sent {hop}/{N} of its array"
        movie.text(320, 270, words if hop else "each rank has an array of its own", step, step + 1)
    return movie


def filling(p: int = 4, m: int = 6) -> Movie:
    """1F1B: bars appear as time goes on; grey is the bubble; at the right the stash."""
    events = simulate(programs("1f1b", p, m), forward=1, backward_input=1, backward_weight=1)
    bars = [e for e in events.timeline.events if e.category == "compute" and e.name[0] in "FB"]
    end = int(max(e.end for e in bars))
    movie = Movie(90 + 20 * end + 90, 60 + 45 * p, end + 4, 0.45, "1F1B fills a pipeline")
    movie.text(90 + 20 * end + 40, 25, "stash")
    for rank in range(p):
        y = 35 + 45 * rank
        movie.text(45, y + 24, f"rank {rank}")
        movie.box(90, y, 20 * end, 36, ROW)
        for e in (e for e in bars if e.rank == rank):
            begin, length = int(e.start), int(e.end - e.start)
            color, ink = (FORWARD, "white") if e.name[0] == "F" else (BACKWARD, INK)
            movie.box(90 + 20 * begin, y, 20 * length, 36, color, begin)
            movie.text(90 + 20 * begin + 10 * length, y + 23, e.name[1:], begin, None, ink)
        for t in range(end + 4):
            begun = sum(e.name[0] == "F" and e.start <= t for e in bars if e.rank == rank)
            done = sum(e.name[0] == "B" and e.end <= t for e in bars if e.rank == rank)
            movie.text(90 + 20 * end + 40, y + 24, begun - done, t, t + 1)
    return movie


def zigzag(N: int = 4) -> Movie:
    """Which blocks of queries and keys each rank computes in a hop: runs, and zig-zag."""
    movie = Movie(640, 330, N + 1, 1.6, "Plain and zig-zag cuts of a causal sequence")
    cuts = {
        "runs of neighbours": [(2 * r, 2 * r + 1) for r in range(N)],
        "zig-zag": [(r, 2 * N - 1 - r) for r in range(N)],
    }
    for i, (name, cut) in enumerate(cuts.items()):
        left = 40 + 320 * i
        movie.text(left + 120, 25, name)
        owner = {piece: rank for rank, pieces in enumerate(cut) for piece in pieces}
        for row in range(2 * N):
            for column in range(row + 1):
                hop, rank = (owner[row] - owner[column]) % N, owner[row]
                place = left + 30 * column, 40 + 30 * row, 29, 29
                movie.box(*place, ROW, 0, hop)
                movie.box(*place, RANKS[rank % 4], hop)
        for hop in range(N):
            blocks = [
                sum(
                    (0.5 if row == column else 1) * ((rank - owner[column]) % N == hop)
                    for row in cut[rank]
                    for column in range(row + 1)
                )
                for rank in range(N)
            ]
            words = f"hop {hop}: blocks per rank " + ", ".join(f"{n:g}" for n in blocks)
            movie.text(left + 120, 305, words, hop, hop + 1)
        movie.text(left + 120, 305, "colour: the rank of the query", N)
    return movie


MOVIES = {"02_ring": ring, "08_filling": filling, "14_zigzag": zigzag}


def main(folder: str) -> None:
    for name, movie in MOVIES.items():
        (Path(folder) / f"{name}.svg").write_text(movie().svg(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
