"""Run one small experiment of a chapter, alone or in one of several processes.

`python tests/launched.py golore pretrain '{"num_steps": 4}' result.json`, or the same
after `accelerate launch`. The first process writes what the experiment returned.
"""

import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from icml25.core.runtime import end_process, leave_processes

if __name__ == "__main__":
    slug, name, options, path = sys.argv[1:]
    experiment = import_module(f"icml25.{slug}").EXPERIMENTS[name]
    config = replace(
        experiment.laptop,
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(options).items()
        },
    )
    result = experiment.function(config, device=torch.device("cpu"), seed=0)
    leave_processes()
    if int(os.environ.get("RANK", 0)) == 0:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        Path(path).write_text(json.dumps({"processes": processes, "result": result}))
    end_process(0)
