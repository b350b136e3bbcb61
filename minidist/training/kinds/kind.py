"""What `minidist train` has to know of a kind of data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from minidist import nn
from minidist.training.settings import Settings

D = TypeVar("D")  # the type of the data


@dataclass(frozen=True)
class Kind(Generic[D]):
    """A kind of data: how to get it, its model, its words, and what a trained model does.

    name             of all such data
    data             its type
    unit             what a batch counts, in words
    target           data -> what one target is, in words
    read             (settings, before, **options) -> data. before: the description of what a run
                     that goes on has learned from, or {}
    options          {option: keywords of argparse}, for `read`; an option that is not given is None
    model            data, settings -> the untrained model
    examples         data, settings -> inputs[n, ...] and targets[n, ...] to train on
    description      data -> what a checkpoint records of it: JSON, with "source", a line of words
    size             data -> how much there is to learn, in words
    outcome          model, data, length, seed -> what a trained model does, in lines of words
    remark           data, loss -> what else to say of the loss, or ""
    defaults         of settings, where they differ from Settings
    refused          settings that the model has no use for
    needs_all_ranks  why the data is not for workers of parameter servers, or ""
    """

    name: str
    data: type[D]
    unit: str
    target: Callable[[D], str]
    read: Callable[..., D]
    model: Callable[[D, Settings], nn.Module]
    examples: Callable[[D, Settings], tuple[np.ndarray, np.ndarray]]
    description: Callable[[D], dict]
    size: Callable[[D], str]
    outcome: Callable[..., str]
    remark: Callable[[D, float], str] = lambda data, loss: ""
    options: dict[str, dict] = field(default_factory=dict)
    defaults: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    needs_all_ranks: str = ""


def pairs_in_words(train: tuple, held_out: tuple) -> str:
    """Return how many examples there are to train on, and how many are kept for the end."""
    return f"{len(train[0]):,} to train on, {len(held_out[0]):,} held out"
