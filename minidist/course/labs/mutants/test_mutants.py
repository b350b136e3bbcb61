"""A student's properties, beside a minidist that may be wrong; see course/property_lab.py."""

import sys
import traceback
import types

from minidist.course.inside import inside
from minidist.course.property_lab import STARTER


@inside
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
    return {"properties": list(found), "raised": raised}


def test_the_example_that_is_handed_out_holds_for_the_package():
    (name,) = properties(STARTER)["properties"]
    assert name.startswith("property_") and not properties(STARTER)["raised"]
