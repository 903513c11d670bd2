"""Images of the Hugging Face library `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from petra.data.hold_out import DEFAULT_TEST_FRACTION, hold_out
from petra.data.image_decoding import open_image
from petra.data.image_files import DEFAULT_IMAGE_SIZE, ImageFileData
from petra.formatting import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

_TEST_SPLITS = ("test", "validation", "valid", "val")


def decode_image(content: Any) -> Image:
    """Decode an image of a data set whose images are not decoded yet: a transform for `StreamBatches`.

    Args:
        content: Encoded bytes, or a dictionary with `bytes` or `path`, as `datasets.Image(decode=False)` gives it.

    Returns:
        An RGB image.

    Raises:
        ValueError: If there is no image in it.

    """
    if isinstance(content, Mapping):
        path = content.get("path")
        content = content.get("bytes") or (Path(path) if path else None)
        return open_image(str(path or "an image of the stream"), _checked(content))
    return open_image("an image of the stream", _checked(content))


def _checked(content: Any) -> bytes | Path:
    if not isinstance(content, bytes | Path):
        raise ValueError(f"an image is a {type(content).__name__}: give encoded bytes, as datasets.Image(decode=False)")
    return content


class HubImages:
    """Images of a `datasets.Dataset`, which stay in its memory-mapped files.

    Args:
        dataset: The data set.
        image: Name of the column with images.
        label: Name of the column with labels.

    """

    def __init__(self, dataset: Any, image: str, label: str) -> None:
        from datasets import Image as ImageFeature

        self._dataset, self._column = dataset.cast_column(image, ImageFeature(decode=False)), image
        self.labels: Tensor = torch.tensor(dataset.select_columns([label])[:][label], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return decode_image(self._dataset[index][self._column]), int(self.labels[index])

    def select(self, index: Tensor) -> HubImages:
        """Return some of the images."""
        chosen = object.__new__(HubImages)
        chosen._dataset, chosen._column = self._dataset.select(index.tolist()), self._column
        chosen.labels = self.labels[index]
        return chosen

    def digest(self) -> str:
        hashed = hashlib.sha256(f"{len(self)} {self._column}".encode())
        hashed.update(self.labels.numpy().data)
        for index in {0, len(self) // 2, len(self) - 1}:  # the others are not read
            content = self._dataset[index][self._column]
            hashed.update(content.get("bytes") or str(content.get("path")).encode())
        return hashed.hexdigest()


def hub_image_data(
    dataset: Any, name: str, image_size: int | None = None, test_fraction: float | None = None
) -> ImageFileData:
    """Return the images of a `datasets.DatasetDict` as a data set of Petra.

    Args:
        dataset: Splits by name: `train`, and `test` or `validation`.
        name: The name that messages use.
        image_size: Height and width of the images that a network gets, by default 224.
        test_fraction: Share of the training images that is held out, if there is no other split; by default 0.1.

    Returns:
        The data set.

    Raises:
        ValueError: If a split or a column is missing.

    """
    if not isinstance(dataset, Mapping) or "train" not in dataset:
        raise ValueError(f"{name} has no split 'train': give a DatasetDict with train and test")
    train = dataset["train"]
    image, label = _columns(train, name)
    samples = HubImages(train, image, label)
    split = next((split for split in _TEST_SPLITS if split in dataset), None)
    if split is not None and test_fraction is not None:
        raise ValueError(f"--test-fraction is {test_fraction}, but {name} has a split {split!r}: leave it out")
    if split is not None:
        test = HubImages(dataset[split], image, label)
    else:
        names = [str(i) for i in range(len(samples))]
        parts = hold_out(names, samples.labels, test_fraction or DEFAULT_TEST_FRACTION, name)
        samples, test = (samples.select(part) for part in parts)
    class_names = tuple(getattr(train.features[label], "names", None) or ())
    classes = len(class_names) or int(max(samples.labels.max(), test.labels.max())) + 1
    return ImageFileData(name, samples, test, classes, image_size or DEFAULT_IMAGE_SIZE, class_names=class_names)


def read_hub_images(where: str, image_size: int | None, test_fraction: float | None) -> ImageFileData:
    """Read images with `datasets`: a folder of `save_to_disk`, or anything that `load_dataset` takes.

    Args:
        where: The folder, or the name of a data set.
        image_size: As in `hub_image_data`.
        test_fraction: As in `hub_image_data`.

    Returns:
        The data set.

    Raises:
        ValueError: If it cannot be read, or `datasets` is not installed.

    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hf: needs the package datasets: pip install 'petra[huggingface]'") from error
    folder = Path(where).expanduser()
    try:
        if (folder / "dataset_dict.json").exists():
            found: Any = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder) if folder.exists() else where)
    except Exception as error:  # the library and what it uses raise many kinds
        raise ValueError(f"hf:{where} cannot be read ({type(error).__name__}: {first_line(error)})") from error
    return hub_image_data(found, where, image_size, test_fraction)


def _columns(dataset: Any, name: str) -> tuple[str, str]:
    kinds = {column: type(feature).__name__ for column, feature in dataset.features.items()}
    image = next((column for column, kind in kinds.items() if kind == "Image"), None)
    label = next((column for column, kind in kinds.items() if kind == "ClassLabel"), None)
    if label is None:
        label = next((column for column in ("label", "labels", "fine_label") if column in kinds), None)
    if image is None or label is None:
        raise ValueError(f"{name} has the columns {kinds}: give one of type Image and one named label")
    return image, label
