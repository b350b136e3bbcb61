"""Ranks, messages between them, and collectives. It knows no gradients.

Read `group.py` (the contract), `board.py` and `shared_memory.py` (how ranks meet, and reduce),
`mailbox.py` and `endpoint.py` (how messages wait), `thread_transport.py` and `process_transport.py`
(what a rank is), `cluster.py` (ranks up, work out, results in), `mesh.py`.
"""

from minidist.comm.cluster import Cluster, run
from minidist.comm.group import Group
from minidist.comm.mesh import Mesh

__all__ = ["Cluster", "Group", "Mesh", "run"]
