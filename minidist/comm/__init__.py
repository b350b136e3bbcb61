"""Ranks, messages between them, and collectives. It knows no gradients.

Read `group.py` (the contract; `arguments.py`, `one_thread.py` and `ledger.py`: what it checks, what
it counts),
`collectives.py` (the algorithms, on messages), `shared_collectives.py`, `shared_memory.py` and
`board.py` (how ranks reduce, and meet), `channel.py`, `mailbox.py` and `endpoint.py` (how messages
wait), `ring_buffer.py` and `wire.py` (how they travel between processes), `logged_group.py`,
`thread_transport.py` and `process_transport.py` (what a rank is; `limits.py`: how many there can
be), `cluster.py` and `report.py`
(ranks up, work out, results in), `mesh.py`, `diagnosis.py` (why nothing moves) and
`interleaving.py` (races by seed).
"""

from minidist.comm.cluster import Cluster, run
from minidist.comm.group import Group
from minidist.comm.mesh import Mesh

__all__ = ["Cluster", "Group", "Mesh", "run"]
