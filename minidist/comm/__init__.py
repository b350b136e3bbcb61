"""Ranks, messages between them, and collectives. It knows no gradients.

Read `group.py` (the contract), `mailbox.py` and `thread_transport.py` (the simplest way to keep
it), `process_transport.py` (the default), `cluster.py` (ranks up, work out, results in), `mesh.py`.
"""

from minidist.comm.cluster import Cluster, run
from minidist.comm.group import Group
from minidist.comm.mesh import Mesh

__all__ = ["Cluster", "Group", "Mesh", "run"]
