"""What every fabric and communicator has to do: results, bytes and errors, against closed forms.

A new one is a row of MACHINES in machines.py. A test that takes `ranks` runs on every machine; one
that takes `processes`, on those whose ranks are processes.
"""
