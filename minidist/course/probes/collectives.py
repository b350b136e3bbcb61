"""What the collectives lab asks of a student's code; it runs beside that code, and judges nothing.

Ranks are threads. Each array is sent with its time of arrival, in steps: a rank sends one message
and takes one message per step, and a message can be used when it has arrived.
"""

import traceback
from unittest import mock

import numpy as np

from minidist.comm import collectives, mailbox
from minidist.comm.diagnosis import call_site
from minidist.course.probes import ranks


class Watched:
    """A channel that records how many bytes it sent to whom, and its current step."""

    def __init__(self, group):
        self.channel, self.rank, self.size = group.channel("recv"), group.rank, group.size
        self.clock = self.taken = 0
        self.sent = []

    def send(self, array, to):
        self.clock += 1
        self.sent.append([to, array.nbytes])
        self.channel.send(array, to)
        self.channel.send(np.array(self.clock), to)

    def recv(self, source):
        array = self.channel.recv(source)
        self.taken = max(self.taken + 1, int(self.channel.recv(source)))
        self.clock = max(self.clock, self.taken)
        return array

    def notes(self):
        return {"sent": np.array(self.sent, int).reshape(-1, 2), "steps": self.clock}


def on_ranks(worker, size):
    """Call worker(group) on ranks; a deadlock shows the lines of collectives.py that wait."""
    with mock.patch.object(mailbox, "call_site", line_of_the_algorithm):
        return ranks.on_ranks(worker, size)


def line_of_the_algorithm():
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_filename == collectives.__file__:
            return f"collectives.py:{line}"
    return call_site()


def all_reduce(algorithm, op, arrays):
    """Reduce one flat array per rank in place."""

    def worker(group):
        channel, x = Watched(group), arrays[group.rank].copy()
        getattr(collectives, algorithm)(channel, x, getattr(np, op))
        return {"x": x, **channel.notes()}

    return on_ranks(worker, len(arrays))


def refusal(algorithm, size):
    """Return whether so many ranks are refused, each by a ValueError."""

    def worker(group):
        try:
            getattr(collectives, algorithm)(Watched(group), np.ones(4), np.add)
        except ValueError:
            return {"refused": True}
        return {"refused": False}

    return on_ranks(worker, size)


def all_to_all(pieces):
    """Exchange pieces[r][s], from rank r to rank s."""

    def worker(group):
        channel, mine = Watched(group), [p.copy() for p in pieces[group.rank]]
        result = collectives.all_to_all(channel, mine)
        own = np.shares_memory(result[group.rank], mine[group.rank])
        named = {f"from {s} on": piece for s, piece in enumerate(result)}
        return {**named, "own shared": own, **channel.notes()}

    return on_ranks(worker, len(pieces))


def star(root, pieces):
    """Give every rank its piece from the root, and collect all pieces at another time."""

    def worker(group):
        down, up = Watched(group), Watched(group)
        here = [p.copy() for p in pieces]
        given = collectives.from_root(down, here if group.rank == root else None, root)
        mine = pieces[group.rank].copy()
        found = collectives.to_root(up, mine, root)
        shared = [*(here if group.rank == root else []), mine]
        answer = {"given": given, "down sent": down.notes()["sent"], "up sent": up.notes()["sent"]}
        for r, piece in enumerate(found or []):
            answer[f"found from {r} on"] = piece
        answer["is none"] = found is None
        fresh = [given, *(found or [])]
        answer["shared"] = any(np.shares_memory(a, b) for a in fresh for b in shared)
        return answer

    return on_ranks(worker, len(pieces))


def reduce_pieces(op, pieces):
    pieces = [p.copy() for p in pieces]
    result = collectives.reduce_pieces(pieces, getattr(np, op))
    return {"result": result, "into the first": result is pieces[0]}
