"""The model split by layers. Read `actions.py`, `layer_split.py`, `gpipe.py`, `one_f_one_b.py`,
`communication.py`, `stage.py`, `executor.py`, `holders.py`, `pipeline.py`; then
`execution_order.py`, `validation.py`, `interleaved.py`, `looped_bfs.py`, `zero_bubble.py`,
`interleaved_zb.py`, `dualpipe_v.py`, `controllable_memory.py`, `zb_auto.py`,
`schedules.py`, `reduction.py`; then `pipedream.py`, `weight_stashing.py`.
`partition.py` and `branch_placement.py` are independent. For an order of your own: `text.py`,
`random_order.py`, and the proof at the end of `validation.py`.
"""

from typing import TYPE_CHECKING

from minidist import on_first_use

if TYPE_CHECKING:
    from minidist.pipeline_parallel.branch_placement import Siamese
    from minidist.pipeline_parallel.communication import add_communication, add_reductions
    from minidist.pipeline_parallel.pipeline import Pipeline
    from minidist.pipeline_parallel.schedules import SCHEDULES, programs
    from minidist.pipeline_parallel.text import read, write
    from minidist.pipeline_parallel.validation import grid, validate
    from minidist.pipeline_parallel.weight_stashing import PipeDream

__all__ = [
    "SCHEDULES",
    "PipeDream",
    "Pipeline",
    "Siamese",
    "add_communication",
    "add_reductions",
    "grid",
    "programs",
    "read",
    "validate",
    "write",
]

# Each name is imported when it is first used: schedules need no NumPy, stages of a model do.
_MODULE_OF = {
    "SCHEDULES": "schedules",
    "PipeDream": "weight_stashing",
    "Pipeline": "pipeline",
    "Siamese": "branch_placement",
    "add_communication": "communication",
    "add_reductions": "communication",
    "grid": "validation",
    "programs": "schedules",
    "read": "text",
    "validate": "validation",
    "write": "text",
}

__getattr__, __dir__ = on_first_use(__name__, _MODULE_OF)
