"""Call a student's properties beside a minidist that may be wrong; see property_lab.py."""

import sys
import traceback
import types

import numpy as np


def properties(source):
    """Run a source, call each of its property_... functions; return which raise, and what."""
    module = types.ModuleType("properties")
    sys.modules["properties"] = module
    exec(compile(source, "properties.py", "exec"), module.__dict__)
    found = {n: f for n, f in vars(module).items() if n.startswith("property_") and callable(f)}
    raised = {}
    for name, function in found.items():
        try:
            function()
        except Exception as error:
            raised[name] = "".join(traceback.format_exception_only(error)).strip()[-300:]
    return {
        "properties": np.array(list(found), dtype=str),
        "raised": np.array(list(raised), dtype=str),
        "messages": np.array(list(raised.values()), dtype=str),
    }
