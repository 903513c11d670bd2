"""Images of different sizes from folders, tar and parquet files, memory and Hugging Face data sets."""

import dataclasses
import io
import json
import pickle
import tarfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.data_files import refused
from helpers.image_files import encoded, made_image, same_batches, tar_sample, write_folder, write_tar
from PIL import Image

from petra.data import Batches, ImageData, ImageFileData, fingerprint, hub_image_data, load_data, make_batches
from petra.data.hold_out import hold_out
from petra.data.image_samples import PackedStrings
from petra.data.transforms import CenterCrop, Resize
from petra.runs.config import RunConfig
from petra.runs.trainer_setup import config_warnings


def normalised(data: ImageFileData, image: Image.Image) -> np.ndarray:
    """A test image as a network gets it."""
    size = data.image_size
    pixels = np.asarray(CenterCrop(size)(Resize(round(size * 8 / 7))(image))).transpose(2, 0, 1) / 255
    return (pixels - np.array(data.mean)[:, None, None]) / np.array(data.std)[:, None, None]


def check_test_images(data: ImageFileData, images: list[Image.Image], labels: list[int]) -> None:
    [(x, y)] = make_batches(data, "test", len(images)).epoch(0)
    assert y.tolist() == labels
    np.testing.assert_allclose(x, np.stack([normalised(data, image) for image in images]), rtol=0, atol=1e-5)


def test_folders_of_different_sizes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"train": 4, "val": 2})
    data = load_data(str(folder))
    assert isinstance(data, ImageFileData)
    assert (data.image_size, data.num_classes, data.class_names) == (224, 3, ("class0", "class1", "class2"))
    assert data.arguments == {"num_classes": 3, "in_channels": 3, "image_size": 224}
    assert (len(data.train), len(data.test), data.unit, data.vocabulary) == (12, 6, "images", ())
    data = load_data(str(folder), image_size=20)
    files = sorted((folder / "val").glob("*/*.jpg"))
    check_test_images(data, [Image.open(io.BytesIO(file.read_bytes())) for file in files], [0, 0, 1, 1, 2, 2])
    again = load_data(str(folder), image_size=24)
    assert fingerprint(again) == fingerprint(data)
    before = fingerprint(data)
    (folder / "val/class1/0.jpg").write_bytes(encoded(made_image(77)))
    assert fingerprint(data) != before
    assert len(load_data(str(folder / "..") + f"/{folder.name}", image_size=8).name) > 2
    pickled = pickle.loads(pickle.dumps(data))  # as worker processes may get it
    assert np.array_equal(pickled.train[3][0], data.train[3][0])


def test_a_run_says_that_it_resizes_images(tmp_path: Path) -> None:
    data = load_data(str(write_folder(tmp_path, {"train": 1, "val": 1})))
    trainer = SimpleNamespace(method=None, network=(), take_messages=list)

    def notes(data, **options):
        config = RunConfig(model="revnet18", data="pets", warmup_epochs=0.0, **options)
        return list(config_warnings(config, data, trainer, 5))

    assert notes(data) == ["images may differ in size, so they are resized to 224×224: --image-size changes this"]
    assert not notes(data, image_size=224)
    assert not notes(load_data("digits"))


def test_images_of_one_size_stay_in_their_files_with_an_image_size(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "x.png").write_bytes(encoded(made_image(0).resize((16, 16)), "PNG"))
    assert isinstance(load_data(str(tmp_path)), ImageData)
    assert isinstance(load_data(str(tmp_path), image_size=16), ImageFileData)


def test_images_in_memory_take_another_size() -> None:
    digits = load_data("digits", image_size=8)
    assert isinstance(digits, ImageData)
    larger = load_data("digits", image_size=12)
    assert isinstance(larger, ImageFileData)
    assert (larger.input_shape, larger.mean, larger.std) == ((1, 12, 12), digits.mean, digits.std)
    x, y = next(make_batches(larger, "test", 4).epoch(0))
    assert x.shape == (4, 1, 12, 12)
    assert torch.equal(y, digits.test_labels[:4])
    image, label = larger.train[5]
    assert np.array_equal(image, digits.train_images[5, 0])
    assert label == digits.train_labels[5]
    with refused("2 channels", "--image-size"):
        load_data("synthetic:2x8x8:3", image_size=12)


@pytest.mark.parametrize("split", ["train", "test"])
def test_batches_in_this_process_are_those_of_workers(tmp_path: Path, split: str) -> None:
    data = load_data(str(write_folder(tmp_path, {"train": 4, "val": 2})), image_size=16)
    wanted = list(Batches(data, split, 5, seed=3, dtype=torch.float64).epoch(1))
    found = make_batches(data, split, 5, seed=3, dtype=torch.float64, workers=1)
    assert same_batches(list(found.epoch(1)), wanted)
    found.close()
    blank = list(make_batches(data, split, 5, seed=3, inputs=False).epoch(1))
    assert all(torch.equal(y, v) for (_, y), (_, v) in zip(blank, wanted, strict=True))
    assert all(not x.any() and x.shape == u.shape for (x, _), (u, _) in zip(blank, wanted, strict=True))


def test_augmentations_by_name(tmp_path: Path) -> None:
    data = load_data(str(write_folder(tmp_path, {"train": 3, "val": 1})), image_size=16)

    def first(**options) -> torch.Tensor:
        return next(make_batches(data, "train", 9, **options).epoch(0))[0]

    plain, crops, strong = (first(augment=name) for name in ("none", "crop-flip", "randaugment"))
    assert torch.equal(first(), crops)
    assert not torch.equal(crops, strong)
    wanted = [torch.tensor(normalised(data, data.train[i][0])) for i in range(9)]
    assert all(min((x - one).abs().max() for one in wanted) < 1e-5 for x in plain)
    x, y = next(make_batches(data, "train", 9, mixup=0.2, cutmix=1.0).epoch(0))
    assert y.shape == (9, 3)
    torch.testing.assert_close(y.sum(1), torch.ones(9))
    digits = load_data("digits")
    augmented = make_batches(digits, "train", 50, augment="randaugment", seed=1)
    x, y = next(augmented.epoch(0))
    usual = next(Batches(digits, "train", 50, seed=1).epoch(0))
    assert torch.equal(y, usual[1])
    assert x.shape == usual[0].shape
    assert torch.equal(
        next(make_batches(digits, "train", 50, augment="none").epoch(0))[0],
        next(Batches(digits, "train", 50, augment=False).epoch(0))[0],
    )
    assert same_batches(
        list(make_batches(digits, "test", 400, augment="randaugment", mixup=1.0).epoch(0)),
        list(Batches(digits, "test", 400).epoch(0)),
    )
    with refused("randaugment", "1x6x4"):
        make_batches(load_data("synthetic:1x6x4:3"), "train", 4, augment="randaugment")


def test_options_of_images_are_refused_for_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abcdefgh" * 20)
    text = load_data(f"text:{file}", seq_len=4)
    with refused("--mixup is 0.2", "windows"):
        make_batches(text, "train", 4, mixup=0.2)
    with refused("--augment is none", "windows"):
        make_batches(text, "train", 4, augment="none")
    with refused("--image-size is 8", "has text"):
        load_data(f"bytes:{file}", image_size=8)
    with refused("--test-fraction is 0.1", "digits", "a test split"):
        load_data("digits", test_fraction=0.1)


# --- without a test split ---


def test_a_part_of_every_class_is_held_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"": 10})
    data = load_data(str(folder), image_size=16)
    assert (len(data.train), len(data.test), data.num_classes) == (27, 3, 3)
    assert data.test.labels.tolist() == [0, 1, 2]
    names = {samples.names[i] for samples in (data.train, data.test) for i in range(len(samples))}
    assert names == {f"class{label}/{i}.jpg" for label in range(3) for i in range(10)}
    more = load_data(str(folder), image_size=16, test_fraction=0.3)
    held, held_more = ({d.test.names[i] for i in range(len(d.test))} for d in (data, more))
    assert len(held_more) == 9
    assert held < held_more
    train_only = write_folder(tmp_path / "other", {"train": 5})
    with refused("--test-fraction 0.1"):
        load_data(str(train_only), image_size=16)
    assert len(load_data(str(train_only), image_size=16, test_fraction=0.2).test) == 3
    (train_only / "test").mkdir()
    with refused("--test-fraction is 0.2", "has test/"):
        load_data(str(train_only), test_fraction=0.2)


def test_holding_out() -> None:
    names, labels = [f"{i}" for i in range(60)], torch.tensor([0, 1, 1] * 20)
    train, test = hold_out(names, labels, 0.25, "x")
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(60))
    assert labels[test].bincount().tolist() == [5, 10]
    reverse = hold_out(names[::-1], labels.flip(0), 0.25, "x")[1]
    assert {names[::-1][i] for i in reverse} == {names[i] for i in test}  # it does not depend on the order
    assert len(hold_out(["a", "b"], torch.tensor([0, 0]), 0.01, "x")[1]) == 1
    assert len(hold_out(["a", "b"], torch.tensor([0, 0]), 0.99, "x")[1]) == 1
    with refused("class 1 has one sample (b)"):
        hold_out(["a", "b", "c"], torch.tensor([0, 1, 0]), 0.5, "x")
    with refused("--test-fraction is 1"):
        hold_out(names, labels, 1, "x")


# --- tar files ---


def test_tar_files(tmp_path: Path) -> None:
    write_tar(tmp_path / "set-train-000.tar", [tar_sample(i, i % 3) for i in range(5)], "a")
    write_tar(tmp_path / "set-train-001.tar", [tar_sample(9 + i, i % 3, as_json=True) for i in range(4)], "dir/b")
    write_tar(tmp_path / "set-val-000.tar", [tar_sample(20 + i, 2 - i) for i in range(3)])
    data = load_data(str(tmp_path), image_size=16)
    assert (len(data.train), len(data.test), data.num_classes, data.class_names) == (9, 3, 3, ())
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    images = [Image.open(io.BytesIO(encoded(made_image(20 + i, 2 - i)))) for i in range(3)]
    check_test_images(data, images, [2, 1, 0])
    wanted = list(make_batches(data, "train", 4).epoch(0))
    found = make_batches(data, "train", 4, workers=2)
    assert same_batches(list(found.epoch(0)), wanted)
    found.close()
    with refused("--test-fraction is 0.1", "set-val-000.tar"):
        load_data(str(tmp_path), test_fraction=0.1)
    (tmp_path / "set-val-000.tar").unlink()
    held = load_data(str(tmp_path), test_fraction=0.3)
    assert (held.image_size, len(held.train), len(held.test)) == (224, 6, 3)
    assert fingerprint(held) != fingerprint(data)


def test_tar_files_with_names_of_classes(tmp_path: Path) -> None:
    samples = [{"png": encoded(made_image(i), "PNG"), "cls": name} for i, name in enumerate((b"dog", b"cat", b"dog"))]
    write_tar(tmp_path / "train.tar", samples)
    write_tar(tmp_path / "test.tar", samples[:2])
    data = load_data(str(tmp_path))
    assert (data.class_names, data.train.labels.tolist(), data.test.labels.tolist()) == (
        ("cat", "dog"),
        [1, 0, 1],
        [1, 0],
    )


def test_tar_mistakes_are_named(tmp_path: Path) -> None:
    file, image = tmp_path / "test.tar", encoded(made_image(0))
    write_tar(file, [tar_sample(0, 0)])
    with refused("only test files", "test.tar"):
        load_data(str(tmp_path))
    assert len(load_data(str(tmp_path), test_only=True).train) == 1
    train = tmp_path / "train.tar"
    for sample, words in (
        ({"jpg": image}, "s0000 has no label"),
        ({"cls": b"1"}, "s0000 has no image"),
        ({"jpg": image, "json": b"{"}, "s0000.json is damaged"),
        ({"jpg": image, "json": json.dumps({"x": 1}).encode()}, "none of label, cls, class"),
        ({"jpg": image, "cls": b"\xff"}, "s0000.cls is damaged"),
    ):
        write_tar(train, [sample])
        with refused(train, words):
            load_data(str(tmp_path))
    write_tar(train, [{"jpg": image[:50], "cls": b"0"}])
    with refused(train, "s0000", "not a readable image"):
        next(make_batches(load_data(str(tmp_path)), "train", 1).epoch(0))
    write_tar(train, [{"jpg": image, "cls": b"-1"}])
    with refused("label -1 is outside"):
        load_data(str(tmp_path))
    with tarfile.open(train, "w:gz") as tar:
        tar.add(file, "x")
    with refused(train, "not a readable tar file", "unpacked"):
        load_data(str(tmp_path))


# --- other containers ---


def write_parquet(file: Path, images: list[bytes], labels: list[int]) -> None:
    pq.write_table(pa.table({"image": pa.array([{"bytes": image} for image in images]), "label": labels}), file)


def test_parquet_files_of_different_sizes(tmp_path: Path) -> None:
    images = [made_image(i, i) for i in range(6)]
    write_parquet(tmp_path / "train.parquet", [encoded(image, "PNG") for image in images], [0, 1, 2] * 2)
    write_parquet(tmp_path / "test.parquet", [encoded(image, "PNG") for image in images[:2]], [0, 1])
    data = load_data(str(tmp_path), image_size=16)
    assert (len(data.train), data.num_classes, data.image_size) == (6, 3, 16)
    check_test_images(data, images[:2], [0, 1])
    assert load_data(str(tmp_path)).image_size == 224
    assert fingerprint(load_data(str(tmp_path))) == fingerprint(data)
    for name in ("train", "test"):
        write_parquet(tmp_path / f"{name}.parquet", [encoded(images[0].resize((8, 8)), "PNG")] * 2, [0, 1])
    assert isinstance(load_data(str(tmp_path), image_size=8), ImageData)
    assert isinstance(load_data(str(tmp_path), image_size=9), ImageFileData)


def hub(count: int, **features) -> datasets.Dataset:
    rows = {"picture": [{"bytes": encoded(made_image(i, i)), "path": None} for i in range(count)]}
    kinds = {"picture": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    return datasets.Dataset.from_dict(
        {**rows, "label": [i % 3 for i in range(count)]}, features=datasets.Features({**kinds, **features})
    )


def test_hugging_face_data_sets(tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=hub(9), validation=hub(3))
    data = hub_image_data(both, "pets", image_size=16)
    assert (len(data.train), data.class_names, data.num_classes) == (9, ("a", "b", "c"), 3)
    check_test_images(data, [image.convert("RGB") for image in hub(3)["picture"]], [0, 1, 2])
    found = make_batches(data, "train", 4, workers=1)
    assert same_batches(list(found.epoch(0)), list(make_batches(data, "train", 4).epoch(0)))
    found.close()
    both.save_to_disk(str(tmp_path / "saved"))
    saved = load_data(f"hf:{tmp_path / 'saved'}", image_size=16)
    assert fingerprint(saved) == fingerprint(data)
    held = hub_image_data(datasets.DatasetDict(train=hub(12)), "pets", test_fraction=0.25)
    assert (len(held.train), len(held.test), sorted(held.test.labels.tolist())) == (9, 3, [0, 1, 2])
    for wrong, words in (
        (hub(3), "no split 'train'"),
        (
            datasets.DatasetDict(train=hub(3).rename_column("label", "z").cast_column("z", datasets.Value("int64"))),
            "named label",
        ),
    ):
        with refused("pets", words):
            hub_image_data(wrong, "pets")
    with refused("--test-fraction is 0.1", "'validation'"):
        hub_image_data(both, "pets", test_fraction=0.1)
    (tmp_path / "empty").mkdir()
    with refused("hf:", "cannot be read"):
        load_data(f"hf:{tmp_path / 'empty'}")


def test_packed_strings() -> None:
    strings = ["", "a", "ü/…", "x" * 300, "\udcff"]
    packed = PackedStrings(strings)
    assert [packed[i] for i in range(len(packed))] == strings
    assert len(PackedStrings([])) == 0


def test_image_file_data_checks_its_fields(tmp_path: Path) -> None:
    data = load_data(str(write_folder(tmp_path, {"train": 1, "val": 1})), image_size=16)
    for change, words in (({"image_size": 0}, "--image-size is 0"), ({"num_classes": 2}, "label 2 is outside 0..1")):
        with refused(words):
            dataclasses.replace(data, **change)
    (tmp_path / "train/class0/0.jpg").write_bytes(b"x")
    with refused("class0/0.jpg", "not a readable image"):
        list(make_batches(data, "train", 3).epoch(0))
