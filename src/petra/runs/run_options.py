"""The options of a run as dataclass fields: every option that decides its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petra.corrections import CORRECTIONS, choose
from petra.data import sentences, text
from petra.data.hold_out import DEFAULT_TEST_FRACTION
from petra.data.image_files import DEFAULT_IMAGE_SIZE
from petra.data.image_pipeline import AUGMENTATIONS, BACKENDS
from petra.methods import METHODS
from petra.pipeline import MessageFormat
from petra.reversible.storage import expand_storages, shorten_storages
from petra.runs.option_fields import fractions, option, schedule_option, whole_numbers
from petra.trainer.lr_schedules import LR_SCHEDULES
from petra.trainer.optimizers import OPTIMIZERS, STATES
from petra.trainer.validation import DEFAULT_STAGES

MODEL, TRAINING, PROCESSES, CHECKPOINTS = "model and data", "training", "several processes", "checkpoints"


def _correction_names(text: str) -> tuple[str, ...]:
    """Parse `predict,shrink:0.9`: names, each with its parameter."""
    return tuple(str(correction) for correction in choose(part for part in text.split(",") if part))


def _storages(text: str) -> tuple[str, ...]:
    """Parse `2*store,24*store:0.5`."""
    return shorten_storages(expand_storages([part.strip() for part in text.split(",") if part.strip()]))


def _comm_dtype(text: str) -> str:
    """Parse `int8`, or `streams=bf16,gradients=int8`."""
    return str(MessageFormat.of(text))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The fields of `RunConfig`."""

    model: str = option(
        help="network; `petra models` lists them. Or package.module:function, a function of your own that returns one",
        group=MODEL,
        metavar="NAME",
    )
    init_from: str | None = option(
        None,
        help="start from the weights of an earlier run or of a .safetensors file, to fine-tune or to train further "
        "(--resume continues the same run exactly)",
        group=MODEL,
        metavar="FOLDER",
        parse=lambda text: str(Path(text)),
        default_text="random weights",
    )
    data: str = option(
        help="digits, synthetic[:CxHxW:CLASSES], text:FILE (by characters), bytes:FILE, tokens:FOLDER (of "
        "`petra tokenize`), hf:NAME (images of the library datasets), or a folder: image files in class folders, "
        "tar or parquet files with images, CIFAR-10/100 batches, or labelled sentences in train.tsv and test.tsv or "
        "dev.tsv",
        group=MODEL,
        metavar="SPEC",
    )
    seq_len: int | None = option(
        None,
        help="tokens in a sample of text",
        group=MODEL,
        metavar="N",
        minimum=1,
        default_text=f"{text.DEFAULT_SEQ_LEN}; {sentences.DEFAULT_SEQ_LEN} for sentences",
    )
    vocab_size: int | None = option(
        None,
        help="largest vocabulary of sentences",
        group=MODEL,
        metavar="N",
        minimum=1,
        default_text=str(sentences.DEFAULT_VOCAB_SIZE),
    )
    image_size: int | None = option(
        None,
        help="height and width of images, which are cropped and resized to it; files are then not read into memory",
        group=MODEL,
        metavar="N",
        minimum=1,
        default_text=f"that of the images, or {DEFAULT_IMAGE_SIZE} if they differ",
    )
    augment: str | None = option(
        None,
        help="random changes of training images: crops and flips, or also RandAugment",
        group=MODEL,
        metavar="NAME",
        choices=AUGMENTATIONS,
        default_text="crop-flip for images",
    )
    mixup: float = option(
        0.0, help="α of mixup, which mixes training images in pairs; usual is 0.2", group=MODEL, minimum=0
    )
    cutmix: float = option(
        0.0, help="α of CutMix, which puts a part of an image into another; usual is 1", group=MODEL, minimum=0
    )
    test_fraction: float | None = option(
        None,
        help="share of the images that is held out for testing, if there are no test images",
        group=MODEL,
        metavar="SHARE",
        above=0,
        below=1,
        default_text=f"{DEFAULT_TEST_FRACTION} for class folders and tar files",
    )
    image_backend: str = option(
        "pillow", help="library that crops and resizes images", group=MODEL, metavar="NAME", choices=BACKENDS
    )
    workers: int | None = option(
        None,
        help="processes that decode images for a replica; they do not change the result",
        group=MODEL,
        metavar="N",
        minimum=0,
        default_text="one per core, at most 16",
    )
    model_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the network; on the command line --width, --depth, … and --set."""
    method: str = option("petra", help="training method", group=TRAINING, metavar="NAME", choices=tuple(METHODS))
    stages: int | list[int] = option(
        DEFAULT_STAGES,
        help="number of stages, or layers in each stage like 3,3,2,2",
        group=TRAINING,
        metavar="N",
        parse=whole_numbers,
        default_text=f"{DEFAULT_STAGES}, at most one per layer",
    )
    schedule: str | list[int] | None = option(
        None,
        help="when stages act. Exact gradients: sequential, gpipe, 1f1b, interleaved:V (V stages per rank). For "
        "pipelined methods also flush:N (flush after every N updates; 1 is exact), low-staleness, lock-step (PETRA's "
        "paper), locked-forward (Features Replay's), or micro-batches in flight in each stage like 6,4,2,0",
        group=TRAINING,
        metavar="NAME",
        parse=schedule_option,
        default_text="that of the method; low-staleness for petra",
    )
    flush_until: int | None = option(
        None,
        help="flush the pipeline after each of the first N updates, which have exact gradients; then continue with "
        "--schedule",
        group=TRAINING,
        metavar="N",
        minimum=0,
        default_text="no warm-up",
    )
    corrections: tuple[str, ...] = option(
        (),
        help=f"corrections for staleness: {', '.join(CORRECTIONS)}, each with or without a parameter, like "
        "predict,shrink:0.9; `petra corrections` explains them",
        group=TRAINING,
        metavar="NAME,…",
        parse=_correction_names,
        default_text="none",
    )
    accumulate: int = option(1, help="micro-batches per update", group=TRAINING, metavar="K", minimum=1)
    epochs: int = option(10, help="passes over the data", group=TRAINING, metavar="N", minimum=1)
    max_steps: int | None = option(
        None,
        help="end after this many updates, if --epochs does not end training before",
        group=TRAINING,
        metavar="N",
        minimum=1,
        default_text="no limit",
    )
    batch_size: int = option(64, help="samples in a micro-batch", group=TRAINING, metavar="N", minimum=1)
    drop_last: bool = option(
        False,
        help="drop the samples of an epoch that do not fill its last micro-batch",
        group=TRAINING,
        default_text="a smaller micro-batch",
    )
    optimizer: str = option(
        "sgd",
        help=f"optimizer of every stage: {', '.join(OPTIMIZERS)}, a class of torch.optim such as adagrad or "
        "torch.optim.RMSprop, or one of your own as package.module:Class. muon orthogonalises the matrices of inner "
        "layers and leaves the rest to AdamW",
        group=TRAINING,
        metavar="NAME",
    )
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer; on the command line --set-optimizer."""
    optimizer_state: str = option(
        "float32",
        help="what adamw keeps its moments in: bf16 takes half the memory of float32, and 8bit, which needs torchao, "
        "a quarter",
        group=TRAINING,
        metavar="NAME",
        choices=STATES,
    )
    lr: float | None = option(
        None,
        help="learning rate after warm-up",
        group=TRAINING,
        minimum=0,
        default_text="0.1 · batch size · K / 256, or less where gradients are very late; 1e-3 except for sgd",
    )
    momentum: float | None = option(
        None,
        help="momentum of sgd and muon, or the first beta of adamw, nadamw and soap",
        group=TRAINING,
        minimum=0,
        below=1,
        default_text="0.9; nadamw 0.99; muon and soap 0.95",
    )
    nesterov: bool = option(True, help="Nesterov momentum in sgd", group=TRAINING, default_text="on")
    beta2: float | None = option(
        None,
        help="second beta of adamw, nadamw, soap, and of the AdamW that muon uses for embeddings, head and vectors",
        group=TRAINING,
        minimum=0,
        below=1,
        default_text="0.999; muon and soap 0.95",
    )
    weight_decay: float | None = option(
        None,
        help="weight decay of all parameters except norms, biases and other vectors",
        group=TRAINING,
        minimum=0,
        default_text="5e-4; 0.05 except for sgd",
    )
    lr_schedule: str = option(
        "steps",
        help="learning rate after warm-up: drops at --lr-milestones, or a cosine to zero",
        group=TRAINING,
        metavar="NAME",
        choices=LR_SCHEDULES,
    )
    warmup_epochs: float | None = option(
        None,
        help="epochs of linear warm-up",
        group=TRAINING,
        metavar="N",
        minimum=0,
        default_text="5, at most a quarter of the training",
    )
    lr_milestones: tuple[float, ...] = option(
        (0.5, 0.75),
        help="fractions of training after which the learning rate is divided by ten",
        group=TRAINING,
        metavar="FRACTION,…",
        parse=fractions,
        minimum=0,
        maximum=1,
    )
    clip_norm: float | None = option(
        None,
        help="clip the gradient norm to this value",
        group=TRAINING,
        above=0,
        default_text="no clipping",
    )
    clip: str = option(
        "stage",
        help="norm that --clip-norm limits: of each stage, or of the whole network. With schedules that are not exact, "
        "global uses norms of other stages that are as many ticks old as there are stages",
        group=TRAINING,
        choices=("stage", "global"),
    )
    ema: float | None = option(
        None,
        help="also keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate it",
        group=TRAINING,
        metavar="DECAY",
        minimum=0,
        below=1,
        default_text="none",
    )
    label_smoothing: float = option(
        0.0,
        help="share of every target that is spread over all classes",
        group=TRAINING,
        minimum=0,
        below=1,
    )
    autocast: str | None = option(
        None, help="precision of residual functions", group=TRAINING, choices=("bf16",), default_text="float32"
    )
    coupling: str | None = option(
        None,
        help="coupling of reversible layers; fixed-point reconstructs inputs to the last bit",
        group=TRAINING,
        choices=("fixed-point",),
        default_text="that of the network",
    )
    storage: tuple[str, ...] = option(
        (),
        help="what layers keep for the backward pass, with the methods reversible and pareprop: reconstruct (nothing), "
        "store (everything), or store:B (about the share B; compiles the layer). Give one value for all reversible "
        "layers, or one for each layer, like 2*store,24*store:0.5",
        group=TRAINING,
        metavar="STORAGE,…",
        parse=_storages,
        default_text="reconstruct",
    )
    compile: bool = option(
        False, help="compile layers and residual functions with torch.compile", group=TRAINING, default_text="off"
    )
    channels_last: bool = option(
        False,
        help="channels-last memory format, the fastest for bf16 convolutions on a GPU",
        group=TRAINING,
        default_text="off",
    )
    comm_dtype: str | None = option(
        None,
        help="rounding of the tensors that are sent between stages: bf16, or int8 or fp8 with a scale for every 64 "
        "values; streams=bf16,gradients=int8 rounds streams and gradients differently",
        group=TRAINING,
        metavar="CODEC",
        parse=_comm_dtype,
        default_text="float32",
    )
    eval_every: int | None = option(
        None,
        help="updates between evaluations",
        group=TRAINING,
        metavar="N",
        minimum=1,
        default_text="after every epoch",
    )
    log_every: int | None = option(
        None,
        help="updates between records of training loss, learning rate and speed",
        group=TRAINING,
        metavar="N",
        minimum=1,
        default_text="only with evaluations",
    )
    patience: int | None = option(
        None,
        help="end after this many evaluations in a row without an improvement (early stopping)",
        group=TRAINING,
        metavar="N",
        minimum=1,
        default_text="no early stopping",
    )
    min_delta: float = option(
        0.0, help="smallest change that counts as an improvement for --patience", group=TRAINING, minimum=0
    )
    monitor: str | None = option(
        None,
        help="test metric of --patience and of the best weights",
        group=TRAINING,
        choices=("accuracy", "loss"),
        default_text="accuracy where it is known",
    )
    seed: int = option(
        0, help="seed of weights, data order and dropout", group=TRAINING, metavar="N", minimum=0, below=2**63
    )
    checkpoint_every: int = option(
        0,
        help="also write a checkpoint every N micro-batches",
        group=CHECKPOINTS,
        metavar="N",
        minimum=0,
        default_text="only after epochs",
    )
    checkpoint_epochs: int = option(
        1,
        help="epochs between checkpoints; a checkpoint holds the micro-batches in flight, which can take a gigabyte",
        group=CHECKPOINTS,
        metavar="N",
        minimum=1,
    )
    keep: int = option(
        1,
        help="keep the last N checkpoints; --from-checkpoint continues from an older one",
        group=CHECKPOINTS,
        metavar="N",
        minimum=1,
    )
    save_best: bool = option(
        True,
        help="keep the weights of the best evaluation in best.safetensors",
        group=CHECKPOINTS,
        default_text="on",
    )
    replicas: int = option(
        1, help="copies of the pipeline that share each micro-batch", group=PROCESSES, metavar="R", minimum=1
    )
