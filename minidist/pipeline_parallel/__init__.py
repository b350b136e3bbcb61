"""The model split by layers. Read `actions.py`, `layer_split.py`, `gpipe.py`, `one_f_one_b.py`,
`communication.py`, `executor.py`, `stage.py`, `micro_batch.py`, `holders.py`, `pipeline.py`; then
`execution_order.py`, `validation.py`, `interleaved.py`, `zero_bubble.py`, `schedules.py`; then
`pipedream.py`, `weight_stashing.py`, `weight_versions.py`. `partition.py` and
`branch_placement.py` are independent.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.pipeline_parallel.communication import add_communication
    from minidist.pipeline_parallel.pipeline import Pipeline
    from minidist.pipeline_parallel.schedules import SCHEDULES, programs
    from minidist.pipeline_parallel.validation import grid, validate
    from minidist.pipeline_parallel.weight_stashing import PipeDream

__all__ = [
    "SCHEDULES",
    "PipeDream",
    "Pipeline",
    "add_communication",
    "grid",
    "programs",
    "validate",
]

# Each name is imported when it is first used: schedules need no NumPy, stages of a model do.
_MODULE_OF = {
    "SCHEDULES": "schedules",
    "PipeDream": "weight_stashing",
    "Pipeline": "pipeline",
    "add_communication": "communication",
    "grid": "validation",
    "programs": "schedules",
    "validate": "validation",
}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value
    try:
        if not name.startswith("_"):
            return import_module(f"{__name__}.{name}")  # a module of this package
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
