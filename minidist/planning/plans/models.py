"""Published sizes of models, by name.

124m to 1.5b    Radford et al., Language Models are Unsupervised Multitask Learners (2019): GPT-2
1.7b to 1008b   Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
                Using Megatron-LM (SC 2021), table 1
6.7b, 13b, 175b Brown et al., Language Models are Few-Shot Learners (2020), table 2.1: GPT-3
22b             Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
                (2022), table 3
176b            Workshop BigScience, BLOOM (2022)
8b, 70b, 405b   Grattafiori et al., The Llama 3 Herd of Models (2024), table 3
"""

from typing import Any

from minidist.errors import WrongInput, unknown
from minidist.planning.costs.transformer_size import TransformerSize


def _gpt2(layers: int, width: int) -> TransformerSize:
    return TransformerSize(layers, width, width // 64, 1024, 50257)


def _gpt3(layers: int, width: int, heads: int, vocab: int = 51200) -> TransformerSize:
    return TransformerSize(layers, width, heads, 2048, vocab)


def _llama3(layers: int, width: int, hidden: int) -> TransformerSize:
    llama: dict[str, Any] = {"tied": False, "expert_width": hidden, "kv_heads": 8, "llama": True}
    return TransformerSize(layers, width, width // 128, 8192, 128256, **llama)


SIZES = {
    "124m": _gpt2(12, 768),
    "355m": _gpt2(24, 1024),
    "774m": _gpt2(36, 1280),
    "1.5b": _gpt2(48, 1600),
    "1.7b": _gpt3(24, 2304, 24),
    "3.6b": _gpt3(30, 3072, 32),
    "6.7b": _gpt3(32, 4096, 32, 50257),
    "7.5b": _gpt3(36, 4096, 32),
    "8b": _llama3(32, 4096, 14336),
    "13b": _gpt3(40, 5120, 40, 50257),
    "18.4b": _gpt3(40, 6144, 48),
    "22b": _gpt3(48, 6144, 64),
    "39.1b": _gpt3(48, 8192, 64),
    "70b": _llama3(80, 8192, 28672),
    "76.1b": _gpt3(60, 10240, 80),
    "145.6b": _gpt3(80, 12288, 96),
    "175b": _gpt3(96, 12288, 96, 50257),
    "176b": _gpt3(70, 14336, 112, 250880),
    "310.1b": _gpt3(96, 16384, 128),
    "405b": _llama3(126, 16384, 53248),
    "529.6b": _gpt3(105, 20480, 128),
    "1008b": _gpt3(128, 25600, 160),
}


def size_of(name: str) -> TransformerSize:
    """Return the size of a published model."""
    if name not in SIZES:
        remedy = "; of any other give --layers, --width, --heads, --sequence and --vocab"
        raise WrongInput(unknown("model", name, SIZES) + remedy)
    return SIZES[name]
