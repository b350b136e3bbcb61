"""Ranks, messages between them, and collectives. It knows no gradients.

Read `group.py`, the contract, and `collectives.py`, the algorithms. Then follow a call:

    call                             path                        file
    every collective                 check, number, count        group.py, arguments.py
      barrier, and before others     compare in shared memory    local/shared_memory_communicator.py
    all_reduce, arrays from `empty`  in place in shared memory   local/shared_memory_communicator.py
      other arrays                   staged in shared memory     local/shared_memory_communicator.py
      algorithm="ring", "tree", ...  messages                    collectives.py
      algorithm="hierarchical"       inside hosts, then between  hierarchical.py
    reduce_scatter, all_gather(out=)
      flat arrays from `empty`       in place in shared memory   local/shared_memory_communicator.py
      other arrays                   messages                    collectives.py
    every other collective           messages                    collectives.py
    send, and every message          to the transport            fabric.py
      up to 64 KB, to a process      ring buffer, shared memory  local/ring_buffer.py
      larger, or no room there       socket                      local/ring_buffer.py
      between threads, or to itself  mailbox                     fabric.py
    recv, and every message          spin, poll, then sleep      fabric.py
    empty                            allocate in shared memory   local/shared_memory.py
      on a GPU                       allocate for CUDA IPC       local/device_memory.py
    beside                           a second thread and stream  beside.py
    run, Cluster                     start ranks, get reports    cluster.py, */*.py
    all of it, under mpiexec         MPI's messages, collectives mpi/, see README.md
    collectives, with a GPU per rank NCCL's collectives          nccl.py
    a program that is wrong          a table of calls, of waits  diagnosis.py
    a rank that dies, or fails       one error for the caller    cluster.py, local/processes.py

`communicator.py` says what a Group needs of a machine, which is where other transports begin.
`mesh.py` names axes of ranks.
"""

from minidist.comm.cluster import Cluster, run
from minidist.comm.group import Group
from minidist.comm.mesh import Mesh

__all__ = ["Cluster", "Group", "Mesh", "run"]
