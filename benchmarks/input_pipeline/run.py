"""Images per second of the input pipeline against workers, compared with what a training step takes from memory.

    python benchmarks/input_pipeline/run.py --images 20000 --device cuda --autocast bf16 --channels-last

Makes a folder of JPEGs of different sizes, measures the recipe petra-imagenet (or another network), prints a table and
writes result.json, or the file that --out names.
"""

import argparse
import io
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

import petra
from petra.data import load_data, make_batches
from petra.data.image_pipeline import BACKENDS
from petra.formatting import render
from petra.measure import environment
from petra.trainer.optimizers import sgd

CLASSES = 10


def made_jpeg(index: int, scale: float = 1.0) -> bytes:
    """A JPEG about as large as those of ImageNet: 500×375 pixels in the mean, 110 kB."""
    random = np.random.default_rng(index)
    width, height = (max(8, int(scale * side * random.uniform(0.7, 1.3))) for side in (500, 375))
    coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = random.normal(0, 9, (height, width, 1))
    pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
    output = io.BytesIO()
    Image.fromarray(pixels).save(output, "JPEG", quality=90)
    return output.getvalue()


def write_images(task: tuple[Path, range, float]) -> int:
    folder, indices, scale = task
    size = 0
    for index in indices:
        split = "val" if index // CLASSES % 20 == 0 else "train"
        place = folder / split / f"class{index % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        content = made_jpeg(index, scale)
        (place / f"{index}.jpg").write_bytes(content)
        size += len(content)
    return size


def make_folder(folder: Path, count: int, scale: float) -> int:
    """Write so many images unless they are there, and return their size in bytes."""
    done = folder / "bytes.txt"
    if not done.exists():
        step = 250
        tasks = [(folder, range(i, min(i + step, count)), scale) for i in range(0, count, step)]
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            done.write_text(str(sum(pool.map(write_images, tasks))))
    return int(done.read_text())


def endless(batches):
    """All epochs of a source, one after another."""
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def rate(iterator, step, options, device: torch.device) -> float:
    """Images per second of a step for every batch, after a warm-up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(options.warmup):
        step(*next(iterator))
    wait()
    began, images = time.perf_counter(), 0
    while images == 0 or time.perf_counter() - began < options.seconds:
        x, y = next(iterator)
        step(x, y)
        images += len(y)
    wait()
    return images / (time.perf_counter() - began)


def make_trainer(options, device: torch.device) -> petra.Trainer:
    torch.manual_seed(0)
    network = petra.models.create(options.model, num_classes=CLASSES, stem="imagenet", width=options.width)
    if options.channels_last:
        network.to(memory_format=torch.channels_last)
    return petra.Trainer(
        network,
        method="petra",
        schedule="lock-step",
        stages=10,
        accumulate=32,
        loss=cross_entropy,
        optimizer=partial(sgd, lr=1e-3),
        autocast=torch.bfloat16 if options.autocast else None,
        device=device,
    )


def measure(options, folder: Path, device: torch.device) -> dict:
    size = make_folder(folder, options.images, options.scale)
    data = load_data(str(folder), image_size=options.image_size)
    common = {"device": device, "channels_last": options.channels_last, "augment": options.augment}

    def source(workers: int):
        return closing(
            make_batches(data, "train", options.batch_size, workers=workers, backend=options.backend, **common)
        )

    trainer = make_trainer(options, device)
    x = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    y = torch.randint(CLASSES, (options.batch_size,), device=device)
    if options.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    capture = trainer.executor.capture
    for _ in range(300):  # until ticks are captured, where they are
        if capture is None or capture.captured_ticks >= 32:
            break
        trainer.step(x, y)
    memory = rate(iter(lambda: (x, y), None), trainer.step, options, device)
    alone, together = {}, {}
    for workers in options.workers:
        with source(workers) as batches:
            alone[workers] = rate(endless(batches), lambda x, y: None, options, device)
        with source(workers) as batches:
            together[workers] = rate(endless(batches), trainer.step, options, device)
    best = max(together.values())
    return {
        "bytes_per_image": size / options.images,
        "pipeline": alone,
        "step_from_memory": memory,
        "step_from_pipeline": together,
        "ratio": best / memory,
        "limit": "input pipeline" if max(alone.values()) < memory else "training step",
        "not_captured": trainer.ineligible_reason,
    }


def show(result: dict) -> str:
    rows = [["none: data in memory", "", f"{result['step_from_memory']:.1f}", ""]]
    for workers, value in result["pipeline"].items():
        together = result["step_from_pipeline"][workers]
        rows.append([f"{workers}", f"{value:.0f}", f"{together:.1f}", f"{together / result['step_from_memory']:.3f}"])
    table = render(["workers", "input pipeline alone", "training step", "of the step from memory"], rows)
    return f"Images per second\n\n{table}\n\nlimit: {result['limit']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="images to make")
    parser.add_argument("--folder", type=Path, help="where to make them, or where they are (default: temporary)")
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--augment", default="crop-flip")
    parser.add_argument("--backend", default="pillow", choices=BACKENDS)
    parser.add_argument("--model", default="revnet18", help="a RevNet (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="its width")
    parser.add_argument("--autocast", choices=["bf16"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--seconds", type=float, default=20, help="duration of each measurement")
    parser.add_argument("--warmup", type=int, default=30, help="batches before it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; nothing is stored")
    options = parser.parse_args()
    options.scale = 1.0
    if options.smoke:
        options.images, options.batch_size, options.image_size, options.scale = 80, 4, 32, 0.1
        options.width, options.seconds, options.warmup, options.workers = 2, 0.05, 1, [0, 1]
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(options, options.folder or Path(temporary) / "images", device)
    print(show(result))
    if not options.smoke:
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "folder", "smoke")}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        stored = {**settings, **result, "environment": environment(device)}
        options.out.write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    main()
