"""Checkpoints: what a run needs to go on, written so that a rank may die at any moment.

    checkpoint.save(folder, model.state(), step)          # one device
    state, step = checkpoint.load(folder)

    checkpoint.save(folder, parts_of(model, optimizer), step, group)      # every rank its own parts
    restore(Saved.newest(folder), model, optimizer)                       # ... on any other mesh

A checkpoint is a folder in `folder`, with a safetensors file for each rank that holds something no
earlier rank holds, and a manifest, which is written last:

    FOLDER/step-00000200/rank-000.safetensors
                         rank-001.safetensors
                         manifest.json      names, global shapes, dtypes; which slice of which
                                            array each file holds; a checksum for each file

    parts.py     what a rank holds of a model and its optimizer: slices of global arrays; what makes
                 up another slice is in nn/shard.py
    writing.py   what may be saved; temporary names, fsync, rename; the manifest last; the last two
                 are kept; setting newer ones aside, to go on from an older one
    manifest.py  names, shapes, slices, and a checksum of every byte
    reading.py   the newest checkpoint that has a manifest; each file is checked before it is used;
                 where one is damaged, which one before it is whole
    run_checkpoints.py   the checkpoints of a training run, saved in a second thread while training
                 goes on; going on with more characters, or more blocks
    published.py   weights that others have published: a folder of safetensors and a config.json
    gpt2.py      GPT-2's in an nn.Transformer;  llama.py: Llama's in an nn.Llama
"""

from minidist.checkpoint.gpt2 import load_gpt2
from minidist.checkpoint.llama import load_llama
from minidist.checkpoint.parts import Part, parts_of, restore
from minidist.checkpoint.reading import Saved, load
from minidist.checkpoint.run_checkpoints import Grown, Keep, RunCheckpoints
from minidist.checkpoint.writing import save, set_aside

__all__ = [
    "Grown",
    "Keep",
    "Part",
    "RunCheckpoints",
    "Saved",
    "load",
    "load_gpt2",
    "load_llama",
    "parts_of",
    "restore",
    "save",
    "set_aside",
]
