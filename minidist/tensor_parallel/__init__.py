"""Matrices split over ranks. Read `column_parallel.py`, `row_parallel.py`, `parallel_attention.py`,
`vocab_parallel.py`, `parallel_transformer.py`, then `sequence_parallel.py`.
"""

from minidist.tensor_parallel.column_parallel import (
    ColumnParallelLinear,
    counted,
    sum_squares,
    unsplit,
)
from minidist.tensor_parallel.parallel_attention import ParallelAttention
from minidist.tensor_parallel.parallel_transformer import ParallelTransformer
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.vocab_parallel import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelTransformer",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "counted",
    "sum_squares",
    "unsplit",
]
