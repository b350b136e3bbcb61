"""Ranks, messages between them, and collectives. It knows no gradients.

Read `group.py`, the contract, and `collectives.py`, the algorithms. Then follow a call:

    call                                 path                          file
    every call                           check, number, count          group.py
    barrier, and before any collective   compare in shared memory      board.py
    all_reduce, arrays from `empty`      in place in shared memory     shared_memory_communicator.py
      other arrays                       staged through shared memory  the same
      algorithm="ring", "tree", ...      messages                      collectives.py
      algorithm="hierarchical"           inside hosts, then between    collectives.py
    reduce_scatter, all_gather(out=)
      flat arrays from `empty`           in place in shared memory     shared_memory_communicator.py
      other arrays                       messages                      collectives.py
    every other collective               messages                      collectives.py
    send, and every message              to the transport              mailbox_fabric.py
      up to 64 KB, between processes     ring buffer in shared memory  ring_buffer.py
      larger, or the ring buffer is full socket                        wire.py
      between threads, or to itself      mailbox                       mailbox.py
    recv, and every message              spin, poll, then sleep        mailbox.py
    empty                                allocate in shared memory     shared_memory.py
    run, Cluster                         start ranks, collect reports  cluster.py, *_transport.py
    all of it, under mpiexec             MPI's messages, collectives   mpi_*.py, see README.md
    a program that is wrong              a table of calls or of waits  diagnosis.py

`fabric.py` says what a Group needs of a machine, which is where other transports begin.
"""

from minidist.comm.cluster import Cluster, run
from minidist.comm.group import Group
from minidist.comm.mesh import Mesh

__all__ = ["Cluster", "Group", "Mesh", "run"]
