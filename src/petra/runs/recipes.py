"""Named recipes: those of the papers, and good starting points for other networks and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from petra.formatting import unknown


@dataclass(frozen=True)
class Recipe:
    """A named set of options for `petra train`; options on the command line override it."""

    name: str
    summary: str
    options: dict[str, Any] = field(default_factory=dict)


_PAPER = {"method": "petra", "schedule": "lock-step", "batch_size": 64, "warmup_epochs": 5.0, "stages": 10}
_TRANSFORMER = {
    "method": "reversible",
    "stages": 1,
    "optimizer": "adamw",
    "lr_schedule": "cosine",
    "clip_norm": 1.0,  # of the whole network if it is one stage, else of each stage
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "digits",
            "a small RevNet on the 8×8 digits that ship with scikit-learn: half a minute on two cores",
            {
                "model": "revnet18",
                "model_options": {"width": 16, "depths": [2, 2]},
                "data": "digits",
                "method": "petra",
                "stages": 4,
                "epochs": 15,
                "batch_size": 32,
                "lr": 0.05,
                "weight_decay": 5e-4,
                "warmup_epochs": 1.0,
                "lr_milestones": (0.6, 0.85),
            },
        ),
        Recipe(
            "petra-cifar10",
            "RevNet-18 on CIFAR-10 as in the PETRA paper: 10 stages, batch 64, k = 8, 300 epochs",
            {
                **_PAPER,
                "drop_last": True,
                "model": "revnet18",
                "accumulate": 8,
                "epochs": 300,
                "checkpoint_epochs": 10,  # one holds 1.1 GiB, and an epoch takes two seconds on a fast GPU
                "weight_decay": 5e-4,
                "lr_milestones": (0.5, 0.75),
            },
        ),
        Recipe(
            "petra-imagenet",
            "RevNet-18 on ImageNet as in the PETRA paper: crops of 224, k = 32, 90 epochs (for ImageNet32, add "
            "--image-size 32 --stem cifar)",
            {
                **_PAPER,
                "model": "revnet18",
                "image_size": 224,  # evaluated in the centre of images that are resized to 256
                "augment": "crop-flip",
                "model_options": {"stem": "imagenet"},
                "accumulate": 32,
                "epochs": 90,
                "weight_decay": 1e-4,
                "lr_milestones": (1 / 3, 2 / 3, 8 / 9),
            },
        ),
        Recipe(
            "tiny-shakespeare",
            "a reversible GPT on characters: give --data text:FILE, a megabyte or so",
            {
                **_TRANSFORMER,
                "model": "rev-gpt",
                "model_options": {"width": 384, "depth": 6, "heads": 6, "dropout": 0.2},
                "seq_len": 256,
                "epochs": 40,
                "batch_size": 64,
                "lr": 1e-3,
                "beta2": 0.99,
                "weight_decay": 0.1,
                "warmup_epochs": 2.0,
            },
        ),
        Recipe(
            "gpt-books",
            "a reversible GPT of 25M parameters, exact pipeline of 8 stages: give --data tokens:FOLDER; for PETRA, add "
            "--schedule low-staleness and keep Muon and --accumulate 16 or more",
            {
                **_TRANSFORMER,
                "model": "rev-gpt-25m",
                "model_options": {"chunked_loss": True},
                "method": "petra",
                "schedule": "1f1b",
                "stages": 8,
                "accumulate": 32,
                "seq_len": 256,
                "epochs": 4,
                "batch_size": 4,
                "drop_last": True,
                "optimizer": "muon",  # PETRA with AdamW needs a far larger k
                "lr": 2e-3,
                "beta2": 0.95,
                "weight_decay": 0.1,
                "warmup_epochs": 0.4,
            },
        ),
        Recipe(
            "sst2",
            "a small reversible RoBERTa from scratch on sentences with labels: give --data FOLDER with train.tsv",
            {
                **_TRANSFORMER,
                "model": "rev-roberta-small",
                "model_options": {"dropout": 0.1},
                "seq_len": 64,
                "vocab_size": 8192,
                "epochs": 10,
                "batch_size": 32,
                "lr": 3e-4,
                "beta2": 0.98,
                "weight_decay": 0.1,
                "warmup_epochs": 1.0,
            },
        ),
        Recipe(
            "rev-vit-cifar10",
            "Rev-ViT-S with patches of 4×4 on CIFAR-10, with exact gradients: give --data FOLDER; PETRA with k = 1 "
            "does not train it well",
            {
                **_TRANSFORMER,
                "model": "rev-vit-s",
                "model_options": {"patch": 4},
                "epochs": 200,
                "batch_size": 128,
                "lr": 2e-4,
                "weight_decay": 0.05,
                "warmup_epochs": 10.0,
                "label_smoothing": 0.1,
            },
        ),
    )
}


def find(name: str) -> Recipe:
    """Return the recipe with this name; raise ValueError if there is none."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
