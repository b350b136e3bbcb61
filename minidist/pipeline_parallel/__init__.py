"""The model split by layers. Read `actions.py`, `layer_split.py`, `gpipe.py`, `one_f_one_b.py`,
`communication.py`, `executor.py`, `stage.py`, `micro_batch.py`, `holders.py`, `pipeline.py`; then
`execution_order.py`, `validation.py`, `interleaved.py`, `zero_bubble.py`, `schedules.py`; then
`pipedream.py`, `weight_stashing.py`, `weight_versions.py`. `partition.py` and
`branch_placement.py` are independent.
"""

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
