"""Reads image data sets from tar files in the layout of webdataset: KEY.jpg and KEY.cls or KEY.json, one after another.

The files are indexed once. Images are read by position, so they can be shuffled over all files.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from petra.data.hold_out import DEFAULT_TEST_FRACTION, hold_out
from petra.data.image_decoding import open_image
from petra.data.image_files import DEFAULT_IMAGE_SIZE, ImageFileData
from petra.data.image_samples import PackedStrings

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
_LABELS = ("cls", "json")
_LABEL_FIELDS = ("label", "cls", "class")
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")


@dataclass(frozen=True)
class _Entry:
    """One image in a tar file."""

    shard: int
    start: int
    length: int
    key: str
    label: str


class TarImages:
    """Images in tar files.

    Args:
        files: The tar files.
        entries: Where the images are.
        labels: One int64 label per image.

    """

    def __init__(self, files: list[Path], entries: list[_Entry], labels: Tensor) -> None:
        self.files, self.labels = files, labels
        self.names = PackedStrings(f"{files[e.shard].name}/{e.key}" for e in entries)
        self._places = torch.tensor([(e.shard, e.start, e.length) for e in entries], dtype=torch.int64).view(-1, 3)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        shard, start, length = self._places[index].tolist()
        with self.files[shard].open("rb") as file:
            file.seek(start)
            content = file.read(length)
        return open_image(f"{self.files[shard]}: {self.names[index]}", content), int(self.labels[index])

    def digest(self) -> str:
        hashed = hashlib.sha256()
        lengths = self._places[:, 2].tolist()
        for index, (length, label) in enumerate(zip(lengths, self.labels.tolist(), strict=True)):
            hashed.update(f"{self.names[index]}\0{length}\0{label}\n".encode("utf-8", "surrogateescape"))
        return hashed.hexdigest()


def read_tar_images(
    folder: Path, test_only: bool = False, image_size: int | None = None, test_fraction: float | None = None
) -> ImageFileData | None:
    """Read the data set in the tar files of a folder, with train or test in their names; None without tar files.

    Args:
        folder: The folder.
        test_only: Accept a folder without training files. The test images are then used for both splits.
        image_size: Height and width of the images that a network gets, by default 224.
        test_fraction: Share of the images that is held out, if no file has test or val in its name.

    Returns:
        The data set.

    """
    files = sorted(folder.glob("*.tar"))
    if not files:
        return None
    tests = [file for file in files if _is_part(file, _TEST)]
    trains = [file for file in files if file not in tests and (_is_part(file, _TRAIN) or not tests)]
    if tests and test_fraction is not None:
        raise ValueError(f"--test-fraction is {test_fraction}, but {tests[0]} is a test file: leave it out")
    if not trains and not test_only:
        raise ValueError(f"{folder} has only test files, such as {tests[0].name}: add files with train in their names")
    entries, test_entries = _index(trains or tests), _index(tests)
    names = sorted({entry.label for entry in (*entries, *test_entries)})
    numbered = all(re.fullmatch("-?[0-9]+", name) for name in names)
    numbers = {name: int(name) if numbered else index for index, name in enumerate(names)}

    def samples(files: list[Path], entries: list[_Entry]) -> TarImages:
        return TarImages(files, entries, torch.tensor([numbers[e.label] for e in entries], dtype=torch.int64))

    train = samples(trains or tests, entries)
    if tests:
        test = samples(tests, test_entries)
    else:
        keys = [train.names[i] for i in range(len(train))]
        parts = hold_out(keys, train.labels, test_fraction or DEFAULT_TEST_FRACTION, folder)
        train, test = (samples(trains, [entries[i] for i in part.tolist()]) for part in parts)
    return ImageFileData(
        folder.resolve().name,
        train,
        test,
        max(numbers.values()) + 1,
        image_size or DEFAULT_IMAGE_SIZE,
        class_names=() if numbered else tuple(names),
    )


def _is_part(file: Path, names: tuple[str, ...]) -> bool:
    """Return whether one of the words of a file's name is in `names`."""
    return any(word in names for word in re.split("[^a-z]+", file.stem.lower()))


def _index(files: list[Path]) -> list[_Entry]:
    return [entry for shard, file in enumerate(files) for entry in _entries(shard, file)]


def _entries(shard: int, file: Path) -> Iterator[_Entry]:
    """The images of a tar file. The parts of a sample are one after another."""
    key, parts = "", dict[str, tarfile.TarInfo]()
    try:
        with tarfile.open(file, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all of them
                folder, _, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                if not member.isfile() or name.startswith("."):
                    continue
                if (folder + "/" + stem) != key:
                    yield from _entry(tar, shard, file, key, parts)
                    key, parts = folder + "/" + stem, {}
                parts[kind.lower()] = member
            yield from _entry(tar, shard, file, key, parts)
    except tarfile.TarError as error:
        raise ValueError(
            f"{file} is not a readable tar file ({error}): download it again; compressed files must be unpacked to .tar"
        ) from error


def _entry(
    tar: tarfile.TarFile, shard: int, file: Path, key: str, parts: dict[str, tarfile.TarInfo]
) -> Iterator[_Entry]:
    if not parts:
        return
    key = key.lstrip("/")
    image = next((parts[kind] for kind in _IMAGES if kind in parts), None)
    label = next((kind for kind in _LABELS if kind in parts), None)
    if image is None or label is None:
        missing = f"no image (.{', .'.join(_IMAGES[:3])}, …)" if image is None else "no label (.cls or .json)"
        raise ValueError(f"{file}: sample {key} has {missing}, only {', '.join(sorted(parts))}: add it")
    content = tar.extractfile(parts[label])
    assert content is not None
    yield _Entry(shard, image.offset_data, image.size, key, _label(file, key, label, content.read()))


def _label(file: Path, key: str, kind: str, content: bytes) -> str:
    try:
        text = content.decode().strip()
        if kind == "cls":
            return text
        fields = json.loads(text)
        found = [fields[name] for name in _LABEL_FIELDS if name in fields]
        if found and isinstance(found[0], int | str):
            return str(found[0])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {key}.{kind} is damaged ({error}): write it again") from error
    raise ValueError(f"{file}: {key}.json has none of {', '.join(_LABEL_FIELDS)}: add one, with a number or a name")
