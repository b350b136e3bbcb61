"""A group that records each operation in an event log: its name, its time and its bytes."""

from collections.abc import Callable
from functools import wraps

from minidist.comm.fabric import Fabric, NewGroup
from minidist.comm.group import Group


def logged(operation: Callable) -> Callable:
    """Wrap a method of Group: each call becomes an event of the group's log."""

    @wraps(operation)
    def call(self: Group, *args, **kwargs):
        log = self.log
        assert log is not None
        start, before = log.clock.now(), self.ledger.total
        try:
            return operation(self, *args, **kwargs)
        finally:
            label = kwargs.get("label")
            name = operation.__name__ if label is None else f"{operation.__name__} {label}"
            log.add(name, start, "communication", self.ledger.total - before)

    return call


class LoggedGroup(Group):
    """The group of a worker of `run(..., log=...)`; `split` returns a LoggedGroup, too."""

    send, recv = logged(Group.send), logged(Group.recv)
    recv_any = logged(Group.recv_any)
    all_reduce, reduce_scatter = logged(Group.all_reduce), logged(Group.reduce_scatter)
    all_gather, all_to_all = logged(Group.all_gather), logged(Group.all_to_all)
    broadcast, reduce = logged(Group.broadcast), logged(Group.reduce)
    scatter, gather = logged(Group.scatter), logged(Group.gather)
    barrier = logged(Group.barrier)


def world(fabric: Fabric) -> Group:
    """Return the group of all ranks, which a run gives to its worker."""
    members = list(range(fabric.size))
    kind = Group if fabric.log is None else LoggedGroup
    communicator = fabric.communicator(NewGroup(members, ()), None)
    assert communicator is not None  # all ranks are in this group
    return kind(fabric, members, (), communicator)
