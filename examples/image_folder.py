"""A folder of images, a trained network, and the class of a new image.

python examples/image_folder.py --data path/to/images        # train/<class>/*.png and test/<class>/*.png
python examples/image_folder.py                              # makes a small folder of its own
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import petra
from petra.data import Batches, load_data


def make_images(folder: Path) -> None:  # noise that is brighter at the top or at the bottom
    generator = torch.Generator().manual_seed(0)
    for index in range(240):
        part, name = ("train", "test")[index % 5 == 4], ("bottom", "top")[index % 2]
        side = 16 + index % 3  # images may have any size
        x = torch.rand(side, 16, 3, generator=generator) * 150
        x[slice(0, side // 2) if name == "top" else slice(side // 2, side)] += 60
        (folder / part / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(x.byte().numpy()).save(folder / part / name / f"{index}.png")


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/images"))
    parser.add_argument("--out", type=Path, default=Path("runs/images-run"))
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    options = parser.parse_args(arguments)
    if not options.data.exists():
        make_images(options.data)
    data = load_data(str(options.data), image_size=options.image_size)
    torch.manual_seed(0)
    sizes = {"width": 8, "depths": (1, 1)} if options.smoke else {"width": 16, "depths": (2, 2)}
    chosen = {name: data.arguments[name] for name in ("in_channels", "num_classes")}
    network = petra.models.create("revnet18", **chosen, **sizes)
    trainer = petra.Trainer(
        network, method="petra", stages=4, loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    )  # fmt: skip
    train, test = Batches(data, "train", 16), Batches(data, "test", 16)
    result = trainer.fit(train, test, epochs=options.epochs, out=options.out, resume=True)  # after an interruption
    x, _ = next(iter(test.epoch(0)))  # normalised as in training
    print("first image:", data.class_names[int(trainer.predict(x[:1]).argmax())], "weights in", options.out)
    return result.test_accuracy or 0.0


if __name__ == "__main__":
    main()
