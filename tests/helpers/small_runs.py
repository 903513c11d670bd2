"""Small runs on the digits."""

from dataclasses import replace

from petra.data import load_data
from petra.runs.config import RunConfig
from petra.runs.run import Run

CONFIG = RunConfig(
    model="revnet18",
    model_options={"width": 4, "depths": [1, 1]},
    data="digits",
    stages=4,
    batch_size=64,
    epochs=2,
    accumulate=2,
    lr=0.05,
    warmup_epochs=0.5,
)


DATA = load_data("digits", seed=0)


def make(folder, transport=None, resume=False, from_checkpoint=None, **changes):
    options = {"transport": transport, "resume": resume, "from_checkpoint": from_checkpoint}
    run = Run(replace(CONFIG, **changes), folder, **options, quiet=True, data=DATA)
    OPEN.append(run)
    return run


OPEN = []
