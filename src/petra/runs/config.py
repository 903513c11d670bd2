"""The configuration of a run: merged from recipe and options, checked before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from petra import methods
from petra.data import Batches, Data, SampleBatches, load_data, make_batches
from petra.data.dataset import SplitName
from petra.data.image_pipeline import Augmentation, Backend
from petra.data.workers import default_workers
from petra.methods import METHODS
from petra.pipeline import partition
from petra.pipeline.stage import Loss
from petra.reversible import ReversibleLayer
from petra.reversible.storage import assign_storages, expand_storages
from petra.runs import recipes
from petra.runs.file_hashes import parse_json, read_json
from petra.runs.model_arguments import options_for_both, outline
from petra.runs.option_fields import check_values
from petra.runs.run_folder import CONFIG_REMEDY
from petra.runs.run_options import RunOptions
from petra.trainer import optimizers
from petra.trainer.loop import LoopSettings
from petra.trainer.loss import cross_entropy
from petra.trainer.lr_schedules import LR_SCHEDULES, CosineLRSchedule, StepLRSchedule
from petra.trainer.optimizers import ADAPTIVE, OPTIMIZERS
from petra.trainer.optimizers_by_name import default_lr, optimizer_by_name
from petra.trainer.schedules import accepts, choose_schedule
from petra.trainer.stability import largest_lr
from petra.trainer.validation import DEFAULT_STAGES, check_storage, choose_corrections

MAY_CHANGE = (
    "checkpoint_every",
    "checkpoint_epochs",
    "keep",
    "save_best",
    "stages",
    "schedule",
    "flush_until",
    "replicas",
    "data",
    "workers",
    "storage",
)
"""Options that may differ when a run is resumed. Data may have moved; its fingerprint is compared."""
ADDED = (
    "image_size",
    "augment",
    "mixup",
    "cutmix",
    "test_fraction",
    "image_backend",
    "workers",
    "max_steps",
    "eval_every",
    "log_every",
    "patience",
    "min_delta",
    "monitor",
    "save_best",
    "keep",
    "storage",
    "optimizer_state",
)
"""Options that the `config.json` of an older run may lack; it had their defaults."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """The options of a run; two runs with the same options on the same machine give the same weights."""

    @classmethod
    def from_options(cls, recipe: str | None, options: dict[str, Any]) -> RunConfig:
        """Merge the given options with those of a recipe and the defaults.

        Args:
            recipe: The name of the recipe, or None.
            options: Values by field name; they take precedence over the recipe.

        Returns:
            The configuration, not validated yet.

        Raises:
            ValueError: If model or data is missing, or an option has no effect with the others.
        """
        merged = dict(recipes.find(recipe).options) if recipe else {}
        recipe_arguments = merged.get("model_options", {})
        if "model" in options and "model" in merged:
            recipe_arguments = options_for_both(merged["model"], options["model"], recipe_arguments)
        model_options = {**recipe_arguments, **options.get("model_options", {})}
        method = METHODS.get(options.get("method", ""))
        if method is not None:  # the recipe's schedule and corrections are for the recipe's method
            if "schedule" in merged and not accepts(method, merged["schedule"]):
                del merged["schedule"]
            if not method.stale:
                merged.pop("corrections", None)
        merged.update(options)
        merged["model_options"] = model_options
        for name in ("model", "data"):
            if name not in merged:
                why = f"because the recipe {recipe} does not set it" if recipe else "or a --recipe that sets it"
                raise ValueError(f"--{name} is missing: give it, {why}")
        if "lr_milestones" in options and merged.get("lr_schedule") == "cosine":
            raise ValueError(
                f"--lr-milestones is {list(options['lr_milestones'])}, but --lr-schedule is cosine: leave one of them "
                "out"
            )
        if "beta2" in options and merged.get("optimizer", "sgd") == "sgd":
            raise ValueError(f"--beta2 is {options['beta2']}, but sgd has none: add --optimizer adamw, or leave it out")
        if "optimizer" in options and "optimizer_options" not in options:
            merged.pop("optimizer_options", None)  # those of the recipe are for its optimizer
        stages = merged.get("stages", DEFAULT_STAGES)
        if "stages" not in options and isinstance(stages, int):
            merged["stages"] = min(stages, len(outline(merged["model"], model_options)))
        return cls(**merged)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """Read what `to_json` returned."""
        known = {f.name: f for f in fields(cls)}
        if strange := sorted(values.keys() - known.keys()):
            raise ValueError(f"the run was written by another version of Petra: unknown {', '.join(strange)}")
        if missing := sorted(known.keys() - values.keys() - set(ADDED)):
            raise KeyError(f"{', '.join(missing)} missing")
        # JSON has no tuples: they are the fields whose default is one.
        tuples = {name for name, f in known.items() if f.default is not MISSING and isinstance(f.default, tuple)}
        converted: dict[str, Any] = {n: tuple(value) if n in tuples else value for n, value in values.items()}
        return cls(**converted)

    @classmethod
    def read(cls, file: Path, edited: bool = False) -> RunConfig:
        """Read the `config.json` of a run.

        Args:
            file: The path of `config.json`.
            edited: Also read a file that is not what the run wrote.

        Returns:
            The validated configuration.

        Raises:
            ChangedFile: If the file is not what the run wrote.
            ValueError: If the file is missing or damaged, or its options are not valid.
        """
        if edited:
            return cls._parse(file, parse_json(file, file.read_bytes(), CONFIG_REMEDY))
        return cls._parse(file, read_json(file.parent, file.name, CONFIG_REMEDY))

    @classmethod
    def _parse(cls, file: Path, values: dict[str, Any]) -> RunConfig:
        try:
            config = cls.from_json(values)
            config.validate()
            return config
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error}): {CONFIG_REMEDY}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values, in the order of the fields."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def check_unchanged(self, before: str, may_change: Container[str] = MAY_CHANGE) -> None:
        """Raise ValueError if the checkpoint to resume from, written with the options `before`, has other options."""
        now = json.loads(json.dumps(self.to_json()))
        for name, value in json.loads(before).items():
            if name not in may_change and now[name] != value:
                raise ValueError(
                    f"the checkpoint was written with {name} {json.dumps(value)}, not {json.dumps(now[name])}: "
                    "restore that in config.json to resume it, or start a new run with --init-from"
                )

    @property
    def base_lr(self) -> float:
        """The learning rate after warm-up: as given, or the default of the optimizer.

        For sgd, that is the paper's rule, or less if gradients are so late that it would be likely to diverge.
        """
        if self.lr is not None:
            return self.lr
        if self.optimizer in ADAPTIVE:
            return 1e-3
        if self.optimizer != "sgd":
            return default_lr(self.optimizer)
        rule, method = optimizers.base_learning_rate(self.batch_size, self.accumulate), methods.find(self.method)
        if not method.stale or any(name.startswith("inertia") for name in self.corrections):
            return rule
        stages = self.stages if isinstance(self.stages, int) else len(self.stages)
        schedule = choose_schedule(method, stages, self.accumulate, self.schedule, self.flush_until)
        return min(rule, largest_lr(schedule, self.beta1))

    @property
    def decay(self) -> float:
        """The weight decay: as given, or the default of the optimizer."""
        if self.weight_decay is not None:
            return self.weight_decay
        return {"sgd": 5e-4, **dict.fromkeys(ADAPTIVE, 0.05)}.get(self.optimizer, 0.0)

    @property
    def beta1(self) -> float:
        """The momentum: as given, or the default of the optimizer."""
        if self.momentum is not None:
            return self.momentum
        return {"nadamw": 0.99, "muon": 0.95, "soap": 0.95}.get(self.optimizer, 0.9)

    @property
    def second_beta(self) -> float:
        """The second beta: as given, or the default of the optimizer."""
        if self.beta2 is not None:
            return self.beta2
        return 0.95 if self.optimizer in ("muon", "soap") else 0.999

    @property
    def loss(self) -> Loss:
        """The training loss."""
        return partial(cross_entropy, label_smoothing=self.label_smoothing)

    def make_optimizer(
        self, parameters: list[nn.Parameter], hidden: Container[torch.Tensor] = ()
    ) -> torch.optim.Optimizer:
        """Return the optimizer of a stage with these parameters; ``hidden`` are those that Muon orthogonalises."""
        if self.optimizer not in OPTIMIZERS:
            return optimizer_by_name(
                self.optimizer,
                parameters,
                lr=self.base_lr,
                weight_decay=self.decay,
                momentum=self.momentum,
                beta2=self.beta2,
                options=self.optimizer_options,
            )
        rates: dict[str, float] = {"lr": self.base_lr, "weight_decay": self.decay}
        betas = (self.beta1, self.second_beta)
        match self.optimizer:
            case "adamw":
                return optimizers.adamw(parameters, betas=betas, state=self.optimizer_state, **rates)
            case "nadamw":
                return optimizers.nadamw(parameters, betas=betas, **rates)
            case "soap":
                return optimizers.soap(parameters, betas=betas, **rates)
            case "muon":
                of_adamw = (0.9, self.second_beta)
                return optimizers.muon(parameters, hidden=hidden, momentum=self.beta1, betas=of_adamw, **rates)
        return optimizers.sgd(parameters, momentum=self.beta1, nesterov=self.nesterov, **rates)

    def curve(self, batches: int) -> StepLRSchedule | CosineLRSchedule:
        """Return the learning-rate curve of a training with so many micro-batches per epoch."""
        updates = batches / self.accumulate
        epochs = self.training_epochs(batches)
        warmup = min(5.0, epochs / 4) if self.warmup_epochs is None else self.warmup_epochs
        if self.lr_schedule == "cosine":
            return CosineLRSchedule(epochs, updates, warmup)
        return StepLRSchedule(epochs, updates, warmup, tuple(self.lr_milestones))

    def training_epochs(self, batches: int) -> float:
        """Return the length of the training in epochs of so many micro-batches."""
        if self.max_steps is None:
            return self.epochs
        return min(float(self.epochs), self.max_steps * self.accumulate / batches)

    @property
    def loop_settings(self) -> LoopSettings:
        """When to end, evaluate, log and save."""
        return LoopSettings(
            epochs=self.epochs,
            max_steps=self.max_steps,
            eval_every=self.eval_every,
            log_every=self.log_every,
            checkpoint_every=self.checkpoint_every,
            checkpoint_epochs=self.checkpoint_epochs,
            keep=self.keep,
            patience=self.patience,
            min_delta=self.min_delta,
            monitor=self.monitor,
            save_best=self.save_best,
        )

    def load_data(self, vocabulary: Sequence[str] = (), test_only: bool = False) -> Data:
        """Load the data set.

        Args:
            vocabulary: The vocabulary to encode text with; empty means that of the data itself.
            test_only: Accept data without a training part.

        Returns:
            The data set.
        """
        return load_data(
            self.data,
            seed=self.seed,
            seq_len=self.seq_len,
            vocab_size=self.vocab_size,
            vocabulary=vocabulary,
            test_only=test_only,
            image_size=self.image_size,
            test_fraction=self.test_fraction,
        )

    def make_batches(
        self, data: Data, split: SplitName, batch_size: int, *, local_processes: int = 1, **common: Any
    ) -> Batches | SampleBatches:
        """Return the batches of one split.

        Args:
            data: The data set.
            split: `"train"` or `"test"`.
            batch_size: The number of samples in a batch.
            local_processes: The number of processes on this machine that decode images.
            **common: Arguments of `petra.data.make_batches`.

        Returns:
            The batches.
        """
        return make_batches(
            data,
            split,
            batch_size,
            seed=self.seed,
            augment=cast(Augmentation | None, self.augment),
            backend=cast(Backend, self.image_backend),
            mixup=self.mixup,
            cutmix=self.cutmix,
            workers=default_workers(local_processes) if self.workers is None else self.workers,
            channels_last=self.channels_last,
            **common,
        )

    def evaluation_batch_size(self, data: Data) -> int:
        """Return the number of samples in a batch for evaluation."""
        # One window of text already has many targets.
        return self.batch_size if "vocab_size" in data.arguments else max(self.batch_size, 256)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The autocast type as PyTorch takes it."""
        return torch.bfloat16 if self.autocast == "bf16" else None

    def validate(self) -> None:
        """Raise ValueError for the first option that cannot work."""
        check_values(type(self), vars(self))
        if self.optimizer_options and self.optimizer in OPTIMIZERS:
            name = next(iter(self.optimizer_options))
            raise ValueError(
                f"--set-optimizer gives {name}, but {self.optimizer} takes --lr, --momentum, --beta2 and "
                "--weight-decay: leave it out, or choose a class of torch.optim"
            )
        if self.optimizer not in OPTIMIZERS:
            self.make_optimizer([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
        optimizers.check_state(self.optimizer, self.optimizer_state)
        if self.clip == "global" and self.clip_norm is None:
            raise ValueError("--clip is global, but there is no --clip-norm: add it, or leave --clip out")
        if not self.nesterov and self.optimizer != "sgd":
            raise ValueError(f"--no-nesterov is for sgd, not for {self.optimizer}: leave it out")
        if self.replicas > self.batch_size:
            raise ValueError(
                f"--replicas is {self.replicas}, but they share micro-batches of {self.batch_size} samples: "
                "give fewer replicas, or a larger --batch-size"
            )
        if self.min_delta and self.patience is None:
            raise ValueError(f"--min-delta is {self.min_delta:g}, but without --patience: add it, or leave this out")
        if self.schedule in LR_SCHEDULES:
            raise ValueError(
                f"--schedule is {self.schedule}, which is a learning-rate schedule: give --lr-schedule {self.schedule}"
            )
        method = methods.find(self.method)
        layers = outline(self.model, self.model_options)
        if self.coupling and not any(isinstance(layer, ReversibleLayer) for layer in layers):
            raise ValueError(
                f"--coupling {self.coupling} is for reversible layers, and {self.model} has none: leave it out"
            )
        if self.channels_last and not any(p.ndim == 4 for p in layers.parameters()):
            raise ValueError(f"--channels-last is for convolutions, and {self.model} has none: leave it out")
        if self.storage:
            check_storage(assign_storages(list(layers), expand_storages(self.storage)), method)
        cuts = partition(len(layers), self.stages)
        schedule = choose_schedule(method, len(cuts), self.accumulate, self.schedule, self.flush_until)
        for correction in choose_corrections(self.corrections, method, schedule):
            correction.check(self.make_optimizer([nn.Parameter(torch.zeros(1))]))
