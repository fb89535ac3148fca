"""A worker that `torchrun` starts, and starts again with all others: `... FOLDER WORK`.

It goes on from the latest checkpoint, as PyTorch's tutorials on fault tolerance show it.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys

import torch
import torch.distributed
from torch import nn

from benchmarks import training_examples
from benchmarks.contestants.training_torch import model_of
from benchmarks.steps_done import StepLog
from benchmarks.workloads import TrainingWork, from_json

#: How many different batches there are.
_BATCHES = 40


def main(folder: str, work: str) -> None:
    of_work = from_json(json.loads(work))
    rank = int(os.environ["RANK"])
    log = StepLog(pathlib.Path(folder), rank, of_work)
    training = TrainingWork("recovery", of_work.model, of_work.workers, of_work.batch, _BATCHES)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(training), gradient_as_bucket_view=True)
    rate, epsilon = training_examples.RATE, training_examples.EPSILON
    adam = torch.optim.Adam(model.parameters(), rate, eps=epsilon, fused=True)
    batches = [
        (torch.from_numpy(images), torch.from_numpy(labels).long())
        for images, labels in training_examples.batches_of(training, rank)
    ]
    path = pathlib.Path(folder) / "checkpoint"
    first = 1
    if path.exists():
        kept = torch.load(path, weights_only=True)
        model.module.load_state_dict(kept["model"])
        adam.load_state_dict(kept["adam"])
        first = kept["step"] + 1
    for step in itertools.count(first):
        images, labels = batches[step % _BATCHES]
        adam.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        adam.step()
        log.done(step)
        if step % of_work.checkpoint_every == 0 and rank == 0:
            states = {"model": model.module.state_dict(), "adam": adam.state_dict(), "step": step}
            aside = path.with_suffix(".new")
            torch.save(states, aside)
            aside.replace(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
