"""Ranks on one machine: processes or threads, their shared memory, mailboxes and sockets."""
