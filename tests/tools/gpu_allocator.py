"""Train a decoder on a GPU for three steps and print what the allocator did, as JSON.

The output is {"history": [[action, address, bytes], ...], "statistics": ...}. It runs in a process
of its own, in which nothing else has allocated. tests/library/test_caching_allocator.py starts it.
"""

import json
import sys

import torch

from course_lib.models import Decoder, random_tokens


def train() -> dict:
    torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
    model = Decoder(
        vocabulary=1000, hidden=256, heads=8, layers=4, sequence=128, dropout=0.1
    ).cuda()
    tokens = random_tokens(8, 128, 1000).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    [entries] = [trace for trace in torch.cuda.memory._snapshot()["device_traces"] if trace]
    history = [
        [entry["action"], entry["addr"], entry["size"]] for entry in entries if "addr" in entry
    ]
    return {"history": history, "statistics": statistics}


if __name__ == "__main__":
    torch.cuda.init()
    json.dump(train(), sys.stdout)
