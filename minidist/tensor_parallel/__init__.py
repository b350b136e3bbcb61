"""Matrices split over ranks. Read `column_parallel.py`, `row_parallel.py`, `parallel_attention.py`,
`vocab_parallel.py`, `parallel_transformer.py`, then `sequence_parallel.py`;
`whole.py` puts the parts together.
"""

from minidist.tensor_parallel.column_parallel import ColumnParallelLinear
from minidist.tensor_parallel.parallel_attention import ParallelAttention
from minidist.tensor_parallel.parallel_transformer import ParallelTransformer
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from minidist.tensor_parallel.whole import counted_here, sum_squares, unsplit

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelTransformer",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "counted_here",
    "sum_squares",
    "unsplit",
]
