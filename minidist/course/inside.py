"""The inside of the sandbox: a script that knows probes and no answers.

    python inside.py TREE SCRATCH < questions

TREE has a minidist with the student's files, and the lab's probes. Each answer is written to
SCRATCH/<number>.npz as soon as it is there.
"""

import importlib
import pickle
import sys
import traceback

if __name__ == "__main__":
    tree, scratch = sys.argv[1:]
    sys.path.insert(0, tree)
    import numpy as np

    for number, (probe, given) in enumerate(pickle.load(sys.stdin.buffer)):
        try:
            answer = getattr(importlib.import_module("probes"), probe)(**given)
        except BaseException:
            answer = {"(error)": np.array(traceback.format_exc()[-4000:])}
        np.savez(f"{scratch}/{number}.npz", **answer)
