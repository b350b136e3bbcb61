"""What the collectives lab asks of a student's code; it runs beside that code, and judges nothing.

Ranks are threads. Each array is sent with its time of arrival, in steps: a rank sends one message
and takes one message per step, and a message can be used when it has arrived.
"""

import traceback
from unittest import mock

import numpy as np

from minidist.comm import collectives, fabric
from minidist.comm.diagnosis import call_site
from minidist.course.labs.ranks import each_rank, refused


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

    def bytes(self):
        return sum(nbytes for _, nbytes in self.sent)


def line_of_the_algorithm():
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_filename == collectives.__file__:
            return f"collectives.py:{line}"
    return call_site()


def shows_waits():
    """Let a deadlock show the lines of collectives.py that wait."""
    return mock.patch.object(fabric, "call_site", line_of_the_algorithm)


@each_rank("arrays", len, shows_waits)
def all_reduce(group, algorithm, op, arrays):
    """Reduce one flat array per rank in place."""
    channel, x = Watched(group), arrays[group.rank].copy()
    getattr(collectives, algorithm)(channel, x, getattr(np, op))
    found = {"x": x, "bytes": channel.bytes(), "the number of steps": channel.clock}
    return found if algorithm == "tree" else found | {"what one rank sends": channel.bytes()}


@each_rank("size", int, shows_waits)
def refusal(group, algorithm, size):
    """Return, on each rank, whether so many of them are refused."""
    reduce = getattr(collectives, algorithm)
    return {"refused": refused(reduce, Watched(group), np.ones(4), np.add)}


@each_rank("pieces", len, shows_waits)
def all_to_all(group, pieces):
    """Exchange pieces[r][s], from rank r to rank s."""
    channel, mine = Watched(group), [p.copy() for p in pieces[group.rank]]
    result = collectives.all_to_all(channel, mine)
    found = {f"the piece of rank {s}": piece for s, piece in enumerate(result)}
    found["its own piece is not copied"] = np.shares_memory(result[group.rank], mine[group.rank])
    found["receivers"] = np.array([to for to, _ in channel.sent], int)
    return found | {"sent": channel.bytes()}


@each_rank("pieces", len, shows_waits)
def star(group, root, pieces):
    """Give every rank its piece from the root, and collect all pieces at another time."""
    down, up = Watched(group), Watched(group)
    here = [p.copy() for p in pieces]
    given = collectives.from_root(down, here if group.rank == root else None, root)
    mine = pieces[group.rank].copy()
    found = collectives.to_root(up, mine, root)
    answer = {"from_root": given, "sent in from_root": down.bytes()}
    answer |= {"to_root is None": found is None, "sent in to_root": up.bytes()}
    answer |= {f"to_root, from {r},": piece for r, piece in enumerate(found or [])}
    kept = [*(here if group.rank == root else []), mine]
    fresh = [given, *(found or [])]
    answer["the caller's array is in the result"] = any(
        np.shares_memory(a, b) for a in fresh for b in kept
    )
    return answer


def reduce_pieces(op, pieces):
    pieces = [p.copy() for p in pieces]
    result = collectives.reduce_pieces(pieces, getattr(np, op))
    return {"the result": result, "the result is the first piece": result is pieces[0]}
