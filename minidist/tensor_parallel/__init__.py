"""Matrices split over ranks. Read `column_parallel.py`, `row_parallel.py`, `parallel_attention.py`,
`vocab_parallel.py`, `parallel_transformer.py`, then `sequence_parallel.py`; `channel_parallel.py`
and `spatial_parallel.py` cut convolutions; `whole.py` cuts parameters and puts them together;
`trainer.py` trains with any of these splits.
"""

from minidist.tensor_parallel.channel_parallel import ChannelParallelConv2d, FilterParallelConv2d
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear
from minidist.tensor_parallel.parallel_attention import ParallelAttention, ParallelPaddedAttention
from minidist.tensor_parallel.parallel_transformer import ParallelTransformer
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.spatial_parallel import SpatialConv2d, SpatialParallel
from minidist.tensor_parallel.trainer import TensorParallel
from minidist.tensor_parallel.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from minidist.tensor_parallel.whole import counted_here, sum_squares, unsplit

__all__ = [
    "ChannelParallelConv2d",
    "ColumnParallelLinear",
    "FilterParallelConv2d",
    "ParallelAttention",
    "ParallelPaddedAttention",
    "ParallelTransformer",
    "RowParallelLinear",
    "SpatialConv2d",
    "SpatialParallel",
    "TensorParallel",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "counted_here",
    "sum_squares",
    "unsplit",
]
