"""A process of a test of ring attention: python -m tests.kernels.attention.ring_ranks RANK SIZE STORE CASE..."""

from __future__ import annotations

import json
import sys

import torch
from torch import distributed

from kernels.attention.training import ring

SHAPE = {"batch": 2, "tokens": 48, "heads": 4, "kv_heads": 2, "head_dim": 16}


def inputs():
    torch.manual_seed(0)
    whole = (SHAPE["batch"], SHAPE["tokens"])
    heads = (SHAPE["heads"], SHAPE["kv_heads"], SHAPE["kv_heads"], SHAPE["heads"])
    return [torch.randn(*whole, count, SHAPE["head_dim"]) for count in heads]


def main():
    rank, size, store, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    options = json.loads(options)
    *tensors, dout = (ring.zigzag_split(it, rank, size) for it in inputs())
    tensors = [it.clone().requires_grad_() for it in tensors]
    sent = []
    original = ring._Ring.pass_on

    def counted(self, passed):
        original(self, passed)
        sent.append(self.num_bytes)

    ring._Ring.pass_on = counted
    out = ring.ring_attention(*tensors, **options)
    forward = max(sent, default=0)
    out.backward(dout)
    total = max(sent, default=0)
    k = tensors[1]
    assert forward == ring.sent_bytes(k, size), (forward, ring.sent_bytes(k, size))
    assert total - forward == ring.sent_bytes(k, size, backward=True)
    torch.save([out.detach(), *(it.grad for it in tensors)], f"{store}-result-{rank}")
    distributed.barrier()


if __name__ == "__main__":
    main()
