"""Made images of different sizes, as folders, tar files and bytes."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def made_image(key: int, label: int = 0, *, side: int = 40) -> Image.Image:
    """A coarse pattern of `side` to twice as many pixels, in a colour that tells the class."""
    random = np.random.default_rng(key)
    width, height = random.integers(side, 2 * side, 2)
    coarse = random.integers(0, 100, (height // 8 + 1, width // 8 + 1, 3))
    coarse[..., label % 3] += 120
    return Image.fromarray(np.kron(coarse, np.ones((8, 8, 1)))[:height, :width].astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    output = io.BytesIO()
    image.save(output, kind)
    return output.getvalue()


def write_folder(folder: Path, counts: dict[str, int], classes: int = 3) -> Path:
    """`counts` images of each class in every split; without a name, the classes are in the folder itself."""
    for split, count in counts.items():
        for label in range(classes):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for i in range(count):
                content = encoded(made_image(1000 * len(split) + 10 * i + label, label))
                (place / f"{i}.jpg").write_bytes(content)
    return folder


def write_tar(file: Path, samples: list[dict[str, bytes]], prefix: str = "s") -> Path:
    """A tar file with one member for each kind of each sample."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for number, sample in enumerate(samples):
            for kind, content in sample.items():
                member = tarfile.TarInfo(f"{prefix}{number:04}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return file


def tar_sample(key: int, label: int, *, as_json: bool = False) -> dict[str, bytes]:
    image = encoded(made_image(key, label))
    return {"jpg": image, **({"json": json.dumps({"label": label}).encode()} if as_json else {"cls": b"%d\n" % label})}


def same_batches(found: list, wanted: list) -> bool:
    """Whether two lists of (inputs, targets) have the same bits."""
    if len(found) != len(wanted):
        return False
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(found, wanted, strict=True))
