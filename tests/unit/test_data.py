"""Data sets: every reader on small generated files, and the errors for malformed ones."""

import dataclasses
import io
import json
import os
import pickle
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.data_files import Array, numbered, refused
from PIL import Image

from petra.data import Batches, ImageData, ImageFileData, load_data

# --- data in memory ---


def test_image_data_checks_its_fields() -> None:
    good = numbered(4)
    bad_pixels = good.train_images.clone()
    bad_pixels[1, 0, 0, 0] = float("nan")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train_images": bad_pixels}, "NaN"),
        ({"test_images": good.test_images / 0}, "infinity"),
        ({"train_labels": good.train_labels - 1}, "label -1"),
        ({"num_classes": 3}, "label 3 is outside 0..2"),
        ({"test_images": good.test_images[:0], "test_labels": good.test_labels[:0]}, "test split is empty"),
        ({"test_images": good.test_images[..., :2]}, "(2, 3, 2)"),
        ({"train_images": good.train_images[0]}, "NCHW"),
        ({"train_images": good.train_images.long()}, "torch.int64"),
        ({"train_labels": good.train_labels[:3]}, "for 4 images"),
        ({"train_labels": good.train_labels.int()}, "torch.int32"),
        ({"mean": (0.0,)}, "2 channels"),
        ({"std": (1.0, 0.0)}, "std"),
        ({"std": (1.0, float("nan"))}, "std"),
        ({"crop_padding": -1}, "crop_padding is -1"),
        ({"class_names": ("a", "b")}, "2 class names"),
    ]
    for change, words in cases:
        with refused("numbered", words):
            dataclasses.replace(good, **change)


def test_digits() -> None:
    data = load_data("digits")
    assert data.input_shape == (1, 8, 8)
    assert (len(data.train_images), len(data.test_images)) == (1437, 360)
    assert (data.num_classes, data.crop_padding, data.flip) == (10, 1, False)
    assert data.train_images.dtype == torch.uint8
    assert set(data.train_images.unique().tolist()) == {round(v * 255 / 16) for v in range(17)}
    assert data.test_labels.bincount().min() >= 34  # stratified
    assert torch.equal(load_data("digits", seed=5).test_images, data.test_images)
    rows = torch.cat((data.train_images, data.test_images)).flatten(1)
    assert len(rows.unique(dim=0)) == 1797  # nothing in both splits


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Petra reads its file, and calls it where the file is missing; the split is also the one it makes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    index = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    for _ in range(2):
        data = load_data("digits")
        parts = ((data.train_images, data.train_labels), (data.test_images, data.test_labels))
        for rows, (found, classes) in zip(index, parts, strict=True):
            expected = np.rint(pixels[rows] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
            assert np.array_equal(found.numpy(), expected)
            assert np.array_equal(classes.numpy(), labels[rows])
        monkeypatch.setattr("petra.data.builtin.find_spec", lambda name: None)


def test_synthetic() -> None:
    data = load_data("synthetic")
    assert data.input_shape == (3, 32, 32)
    assert (len(data.train_labels), len(data.test_labels), data.num_classes) == (1024, 256, 10)
    small = load_data("synthetic:1x16x8:3:5", seed=1)
    assert small.input_shape == (1, 16, 8)
    assert (len(small.train_labels), len(small.test_labels), small.num_classes) == (5, 1, 3)
    assert small.crop_padding == 2
    assert torch.equal(load_data("synthetic:1x16x8:3:5", seed=1).train_images, small.train_images)
    assert not torch.equal(load_data("synthetic:1x16x8:3:5", seed=2).train_images, small.train_images)
    pixels = data.train_images.double() / 255
    assert data.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert data.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())
    for bad in ("synthetic:", "synthetic:3x32:10", "synthetic:3x0x32:10", "synthetic:3x32x32:10:-5"):
        with refused(repr(bad), "CxHxW:classes"):
            load_data(bad)


def test_load_data_names_what_it_cannot_find(tmp_path: Path) -> None:
    with refused("'digitz'", "digits", kind=FileNotFoundError):
        load_data("digitz")
    (tmp_path / "notes.txt").write_text("nothing here")
    with refused(tmp_path, "CIFAR-10", "parquet", "train/<class>"):
        load_data(str(tmp_path))
    with refused("is a file", "folder"):
        load_data(str(tmp_path / "notes.txt"))


# --- CIFAR ---

CIFAR10 = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def cifar_part(index: int, classes: int) -> tuple[Array, Array]:
    """Two images: (pixels, labels) of the file with this index."""
    random = np.random.default_rng(index)
    return random.integers(0, 256, (2, 3072), np.uint8), random.integers(0, classes, 2)


def python2_pickle(pixels: Array, labels: Array) -> bytes:
    """A file as Python 2 wrote the published ones: byte strings, and NumPy's old module names."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def python3_pickle(pixels: Array, labels: Array, key: bytes = b"labels", protocol: int = 2) -> bytes:
    return pickle.dumps({b"data": pixels, key: labels.tolist()}, protocol=protocol)


def check_cifar(data: ImageData, name: str, classes: int, train_files: int) -> None:
    assert (data.name, data.num_classes, data.input_shape) == (name, classes, (3, 32, 32))
    assert (data.crop_padding, data.flip) == (4, True)
    parts = [cifar_part(i, classes) for i in range(train_files + 1)]
    pixels = np.concatenate([p for p, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([v for _, v in parts])
    assert np.array_equal(torch.cat((data.train_images, data.test_images)), pixels)
    assert np.array_equal(torch.cat((data.train_labels, data.test_labels)), labels)
    assert len(data.test_images) == 2


def write_cifar10(root: Path) -> None:
    root.mkdir(exist_ok=True)
    for i, name in enumerate(CIFAR10):
        write = python2_pickle if i % 2 else python3_pickle
        (root / name).write_bytes(write(*cifar_part(i, 10)))


@pytest.mark.parametrize("child", [".", "cifar-10-batches-py"])
def test_cifar10_python(tmp_path: Path, child: str) -> None:
    write_cifar10(tmp_path / child)
    check_cifar(load_data(str(tmp_path)), "cifar10", 10, 5)


@pytest.mark.parametrize("child", [".", "cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path: Path, child: str) -> None:
    (tmp_path / child).mkdir(exist_ok=True)
    for i, name in enumerate(CIFAR10):
        pixels, labels = cifar_part(i, 10)
        records = np.concatenate((labels[:, None].astype(np.uint8), pixels), 1)
        (tmp_path / child / f"{name}.bin").write_bytes(records.tobytes())
    check_cifar(load_data(str(tmp_path)), "cifar10", 10, 5)


@pytest.mark.parametrize("child", [".", "cifar-100-python"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar100_python(tmp_path: Path, child: str, protocol: int) -> None:
    (tmp_path / child).mkdir(exist_ok=True)
    for i, name in enumerate(("train", "test")):
        content = python3_pickle(*cifar_part(i, 100), key=b"fine_labels", protocol=protocol)
        (tmp_path / child / name).write_bytes(content)
    (tmp_path / child / "meta").write_bytes(pickle.dumps({}))
    check_cifar(load_data(str(tmp_path)), "cifar100", 100, 1)


def test_the_training_split_may_be_missing_with_test_only(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    whole = load_data(str(tmp_path / "cifar"))
    assert isinstance(whole, ImageData)
    for file in (tmp_path / "cifar").glob("data_batch_*"):
        file.unlink()
    (tmp_path / "parquet").mkdir()
    write_parquet(tmp_path / "parquet" / "test.parquet", [picture(0)], [1])
    for folder in ("cifar", "parquet"):
        with pytest.raises((ValueError, OSError)):
            load_data(str(tmp_path / folder))
    found = load_data(str(tmp_path / "cifar"), test_only=True)
    assert isinstance(found, ImageData)
    assert torch.equal(found.test_images, whole.test_images)
    found = load_data(str(tmp_path / "parquet"), test_only=True)
    assert isinstance(found, ImageData)
    assert found.test_labels.tolist() == [1]


def test_two_cifars_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").touch()
    with refused("more than one data set", tmp_path / "cifar-10-batches-py", tmp_path / "cifar-100-python"):
        load_data(str(tmp_path))


@pytest.mark.parametrize("child", [".", "cifar-100-binary"])
def test_cifar100_binary(tmp_path: Path, child: str) -> None:
    (tmp_path / child).mkdir(exist_ok=True)
    for i, name in enumerate(("train.bin", "test.bin")):
        pixels, labels = cifar_part(i, 100)
        heads = np.stack((np.full(2, 19), labels), 1).astype(np.uint8)
        (tmp_path / child / name).write_bytes(np.concatenate((heads, pixels), 1).tobytes())
    check_cifar(load_data(str(tmp_path)), "cifar100", 100, 1)


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def test_a_pickle_that_would_run_code_raises(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    bad = tmp_path / "data_batch_3"
    bad.write_bytes(pickle.dumps({b"data": Evil(tmp_path / "owned"), b"labels": []}, protocol=2))
    with refused(bad, "posix.mkdir" if os.name == "posix" else "mkdir"):
        load_data(str(tmp_path))
    assert not (tmp_path / "owned").exists()
    bad.write_bytes(b"cbuiltins\neval\n(V1\ntR.")
    with refused(bad, "builtins.eval"):
        load_data(str(tmp_path))


def test_broken_cifar_files_are_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    bad = tmp_path / "data_batch_2"
    pixels, labels = cifar_part(1, 10)
    whole = python2_pickle(pixels, labels)
    contents = [b"", b"hello", whole[:-1], whole[:3000], whole[:40], pickle.dumps([1])]
    changed: list[dict[bytes, Any]] = [
        {},
        {b"data": pixels},
        {b"data": pixels[:, :-1], b"labels": [1, 2]},
        {b"data": pixels.astype(np.int16), b"labels": [1, 2]},
        {b"data": pixels[:0], b"labels": []},
        {b"data": pixels, b"labels": [1]},
        {b"data": pixels, b"labels": [1, 10]},
        {b"data": pixels, b"labels": [-1, 1]},
        {b"data": pixels, b"labels": [1, [2]]},
        {b"data": pixels, b"labels": [1.5, 2.5]},
    ]
    for content in contents + [pickle.dumps(c, protocol=2) for c in changed]:
        bad.write_bytes(content)
        with refused(bad, "again"):
            load_data(str(tmp_path))
    bad.unlink()
    with refused(bad, "missing", kind=FileNotFoundError):
        load_data(str(tmp_path))


@pytest.mark.parametrize("size", [0, 1, 3072, 3074, 2 * 3074 - 1])
def test_a_truncated_binary_is_named(tmp_path: Path, size: int) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(3074))
    (tmp_path / "test.bin").write_bytes(bytes(size))
    if size == 3074:
        assert len(load_data(str(tmp_path)).test_images) == 1
    else:
        with refused(tmp_path / "test.bin"):
            load_data(str(tmp_path))


# --- encoded images ---


def picture(index: int, shape: tuple[int, ...] = (16, 8, 3)) -> Array:
    return np.random.default_rng(index).integers(0, 256, shape, np.uint8)


def png(pixels: Array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def as_nchw(pictures: list[Array]) -> Array:
    return np.stack(pictures).transpose(0, 3, 1, 2)


def write_parquet(
    path: Path, images: list[Any], labels: list[Any], *, columns: str = "img label", names: Any = None
) -> None:
    image, label = columns.split()
    encoded = [{"bytes": i if i is None else png(i), "path": None} for i in images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    extra = pa.array(list(range(len(labels))), pa.int64())
    table = pa.table({"id": extra, image: pa.array(encoded, kind), label: pa.array(labels, pa.int64())})
    if names is not None:
        feature = {label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": feature}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def test_parquet_with_several_files_and_class_names(tmp_path: Path) -> None:
    folder = tmp_path / "flowers"
    pictures = [picture(i) for i in range(6)]
    write_parquet(folder / "data/train-00000-of-00002.parquet", pictures[:3], [0, 1, 0], names=["a", "b", "c"])
    write_parquet(folder / "data/train-00001-of-00002.parquet", pictures[3:5], [1, 1], names=["a", "b", "c"])
    write_parquet(folder / "data/test-00000-of-00001.parquet", pictures[5:], [1], names=["a", "b", "c"])
    data = load_data(str(folder))
    assert (data.name, data.num_classes, data.class_names) == ("flowers", 3, ("a", "b", "c"))
    assert (data.input_shape, data.crop_padding, data.flip) == ((3, 16, 8), 2, True)
    assert np.array_equal(data.train_images, as_nchw(pictures[:5]))
    assert np.array_equal(data.test_images, as_nchw(pictures[5:]))
    assert data.train_labels.tolist() == [0, 1, 0, 1, 1]
    list(Batches(data, "train", 2).epoch(0))


@pytest.mark.parametrize("other", ["train-1.parquet", "test-1.parquet"])
def test_parquet_files_that_number_classes_differently(tmp_path: Path, other: str) -> None:
    for name in ("train-0.parquet", "test-0.parquet", other):
        names = ["b", "a"] if name == other else ["a", "b"]
        write_parquet(tmp_path / name, [picture(0)], [1], names=names)
    with pytest.raises(ValueError, match="number their classes differently, a, b… and b, a"):
        load_data(str(tmp_path))


@pytest.mark.parametrize("columns", ["image fine_label", "photo labels"])
@pytest.mark.parametrize("test_name", ["validation-0.parquet", "val.parquet"])
def test_parquet_without_metadata_and_grey(tmp_path: Path, columns: str, test_name: str) -> None:
    pictures = [picture(i, (8, 8)) for i in range(3)]
    write_parquet(tmp_path / "train.parquet", pictures[:2], [4, 0], columns=columns)
    write_parquet(tmp_path / test_name, pictures[2:], [5], columns=columns)
    data = load_data(str(tmp_path))
    assert (data.num_classes, data.class_names) == (6, ())
    assert data.input_shape == (1, 8, 8)
    assert np.array_equal(data.train_images, np.stack(pictures[:2])[:, None])


def test_parquet_with_classes_that_are_true_or_false(tmp_path: Path) -> None:
    table = pa.table({"img": [png(picture(0)), png(picture(1))], "label": [True, False]})
    for name in ("train", "test"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert load_data(str(tmp_path)).train_labels.tolist() == [1, 0]


def test_one_coloured_image_makes_all_rgb(tmp_path: Path) -> None:
    grey, coloured = picture(0, (8, 8)), picture(1, (8, 8, 3))
    write_parquet(tmp_path / "train.parquet", [grey], [0])
    write_parquet(tmp_path / "test.parquet", [coloured], [0])
    data = load_data(str(tmp_path))
    assert np.array_equal(data.train_images[0], np.stack([grey] * 3))
    assert np.array_equal(data.test_images[0], coloured.transpose(2, 0, 1))


def test_more_images_than_one_task_decodes_keep_their_order(tmp_path: Path) -> None:
    pictures = [np.full((2, 2), i % 251, np.uint8) for i in range(700)]
    write_parquet(tmp_path / "train.parquet", pictures, [0] * 700)
    write_parquet(tmp_path / "test.parquet", pictures[:1], [0])
    assert load_data(str(tmp_path)).train_images[:, 0, 0, 0].tolist() == [i % 251 for i in range(700)]


@pytest.mark.parametrize("unlabelled", [-1, None])
def test_parquet_in_a_folder_of_the_hub_with_a_test_split_without_labels(tmp_path: Path, unlabelled: int) -> None:
    root = tmp_path / "plain_text"
    for name, labels in (("train", [1]), ("validation", [1, 0]), ("test", [unlabelled])):
        write_parquet(root / f"{name}-00000-of-00001.parquet", [picture(0)] * len(labels), labels)
    data = load_data(str(tmp_path))
    assert isinstance(data, ImageData)
    assert len(data.test_images) == 2
    write_parquet(tmp_path / "other" / "train.parquet", [picture(0)], [0])
    with refused("more than one data set", root, tmp_path / "other"):
        load_data(str(tmp_path))


def test_parquet_mistakes_are_named(tmp_path: Path) -> None:
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    one, tall = picture(0), picture(0, (20, 8, 3))
    write_parquet(train, [one], [0])
    with refused("no test*.parquet"):
        load_data(str(tmp_path))
    write_parquet(test, [one, tall], [0, 0])
    assert isinstance(load_data(str(tmp_path)), ImageFileData)  # of different sizes
    write_parquet(test, [one, one], [0, -1])
    with refused("test", "label -1"):
        load_data(str(tmp_path))
    write_parquet(test, [one, one], [0, None])
    with refused(test, "1 empty label"):
        load_data(str(tmp_path))
    write_parquet(test, [one], [-1])
    with refused("no test*.parquet or validation*.parquet with labels"):
        load_data(str(tmp_path))
    write_parquet(test, [one, None], [0, 0])
    with refused(test, "row 1", "no image bytes"):
        load_data(str(tmp_path))
    write_parquet(test, [], [])
    with refused("test", "empty"):
        load_data(str(tmp_path))
    write_parquet(test, [one], [0], columns="img species")
    with refused(test, "no label column", "species"):
        load_data(str(tmp_path))
    pq.write_table(pa.table({"label": [1], "img": ["a"]}), test)
    with refused(test, "no image column", "nor a text column", "or sentence or text"):
        load_data(str(tmp_path))
    pq.write_table(pa.table({"label": ["cat"], "img": [png(one)]}), test)
    with refused(test, "column label of type string", "integer labels"):
        load_data(str(tmp_path))
    broken = {"label": [0], "img": pa.array([b"\x89PNG broken"], pa.binary())}
    pq.write_table(pa.table(broken), test)
    with refused(f"{test} row 0", "not a readable image"):
        load_data(str(tmp_path))
    write_parquet(test, [one], [0])
    test.write_bytes(test.read_bytes()[:-20])
    with refused(test, "not a readable parquet file"):
        load_data(str(tmp_path))


@pytest.mark.parametrize("module", ["pyarrow", "PIL"])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in ("train", "test"):
        write_parquet(tmp_path / f"{name}.parquet", [picture(0)], [0])
    monkeypatch.setitem(sys.modules, module, None)
    with refused("pip install 'petra[images]'"):
        load_data(str(tmp_path))


def write_image(path: Path, pixels: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize("test_name", ["test", "val", "valid", "validation"])
def test_image_folder(tmp_path: Path, test_name: str) -> None:
    folder = tmp_path / "pets"
    write_image(folder / "train/dog/b.png", picture(2))
    write_image(folder / "train/dog/a.BMP", picture(1))
    write_image(folder / "train/cat/z.png", picture(0))
    write_image(folder / test_name / "dog/x.png", picture(3))
    write_image(folder / test_name / "cat/x.webp", picture(4))
    write_image(folder / test_name / "cat/y.jpg", picture(5))
    write_image(folder / test_name / "dog/y.tif", picture(6))
    (folder / "train/dog/._a.png").write_bytes(b"of another system")
    (folder / "train/dog/notes.txt").write_text("not an image")
    (folder / "train/.cache").mkdir()
    data = load_data(str(folder))
    assert (data.name, data.num_classes, data.class_names) == ("pets", 2, ("cat", "dog"))
    assert (data.input_shape, data.crop_padding, data.flip) == ((3, 16, 8), 2, True)
    assert data.train_labels.tolist() == [0, 1, 1]
    assert data.test_labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(data.train_images, as_nchw([picture(0), picture(1), picture(2)]))
    assert np.array_equal(data.test_images[2], picture(3).transpose(2, 0, 1))


def test_image_folder_mistakes_are_named(tmp_path: Path) -> None:
    write_image(tmp_path / "train/cat/a.png", picture(0))
    with refused(tmp_path, "test, val, valid, validation", "--test-fraction"):
        load_data(str(tmp_path))
    (tmp_path / "train/dog").mkdir()
    (tmp_path / "test/dog").mkdir(parents=True)
    (tmp_path / "test/cat").mkdir()
    with refused(tmp_path / "train/dog", "contains no images", "or remove it"):
        load_data(str(tmp_path))
    (tmp_path / "train/dog").rmdir()
    (tmp_path / "test/dog").rmdir()
    (tmp_path / "test/cat").rmdir()
    with refused("['cat']", "match"):
        load_data(str(tmp_path))
    (tmp_path / "test/cat").mkdir()
    with refused(tmp_path / "test", "no images"):
        load_data(str(tmp_path))
    bad = tmp_path / "test/cat/a.png"
    write_image(bad, picture(0, (8, 8, 3)))
    assert isinstance(load_data(str(tmp_path)), ImageFileData)  # of different sizes
    bad.write_bytes(png(picture(0))[:100])
    with refused(bad, "not a readable image"):
        load_data(str(tmp_path))
    write_image(bad, picture(0, (16, 8)).astype(np.uint16))
    with refused(bad, "8 bits"):
        load_data(str(tmp_path))


def test_a_checksum_error_inside_a_png_is_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_image(tmp_path / split / "cat/a.png", picture(0))
    bad = tmp_path / "train/cat/a.png"
    content = bytearray(bad.read_bytes())
    content[20] ^= 1  # in the header, whose checksum no longer fits
    assert zlib.crc32(content[12:29]) != int.from_bytes(content[29:33], "big")
    bad.write_bytes(content)
    with refused(bad, "not a readable image"):
        load_data(str(tmp_path))
