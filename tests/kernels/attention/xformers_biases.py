"""Stand-ins for xFormers' biases, where it is not installed: the types, attributes and meanings that are read."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch


def seqinfo(lengths):
    starts = [0, *itertools.accumulate(lengths)]
    return SimpleNamespace(
        seqstart=torch.tensor(starts, dtype=torch.int32),
        seqstart_py=starts,
        max_seqlen=max(lengths),
    )


def spaced(starts, lengths):
    return SimpleNamespace(
        seqstart=torch.tensor(starts, dtype=torch.int32), seqstart_py=starts, seqlen_py=lengths
    )


def bias(name, **attributes):
    """Return an object whose type has a name of xFormers."""
    return type(name, (), attributes)()
