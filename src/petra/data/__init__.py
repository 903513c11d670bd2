"""Data sets, and batches that depend on nothing but seed, epoch and index.

Start with `sources.py`: `load_data` turns a name or a path into a data set. `dataset.py` defines the interface that all
data sets share, and `batches.py` makes batches from it on the device. `batch_source.py` defines the interface of
everything that training can read batches from, and `make_batches.py` chooses one for a data set.

Sources of batches that worker processes prepare (`workers.py`): `sample_batches.py` for data sets by index,
`stream_batches.py` for streams, `loader_batches.py` for loaders of PyTorch and torchdata. `batch_plan.py` says which
samples are in which batch, `sample_reader.py` reads and seeds samples, and `device_batches.py` copies batches to the
device. The other files, by kind of data:

- Images in memory: `images.py` is the data set, and `image_split.py` augments and normalises batches. `builtin.py`,
  `cifar.py` (with `safe_pickle.py`), `image_folder.py` and `parquet_images.py` read them; `image_decoding.py` decodes
  PNG, JPEG and other formats.
- Images that are decoded when they are needed: `image_files.py` is the data set, of `image_samples.py`, `tar_images.py`
  or `hugging_face.py`, and `memory_images.py` makes it of images in memory. `image_pipeline.py` combines the transforms
  of `transforms.py` and `rand_augment.py`; `mixing.py` has mixup and CutMix. `hold_out.py` chooses test images.
- One long text, for language models: `text.py`, by characters or bytes, in memory. `token_files.py` has the tokens of a
  tokenizer, in files of any size. `tokenization.py` writes them, with `documents.py`, which reads texts, and
  `tokenizer.py`. `bits_per_byte.py` converts the loss.
- Labelled texts: `sentences.py` is the data set, `labelled_text.py` reads it, and `vocabulary.py` turns words into
  tokens.

`parquet_files.py` has what the readers of parquet files share.
"""

from petra.data.batch_source import (
    BatchSource,
    ResumableBatchSource,
    batch_count,
    batch_samples,
    batch_weight,
    close_batches,
)
from petra.data.batches import Batches
from petra.data.bits_per_byte import bits_per_byte
from petra.data.dataset import Data, Split, fingerprint
from petra.data.hugging_face import decode_image, hub_image_data
from petra.data.image_files import ImageFileData
from petra.data.image_pipeline import image_transform
from petra.data.images import ImageData
from petra.data.loader_batches import LoaderBatches
from petra.data.make_batches import make_batches
from petra.data.mixing import Mixing
from petra.data.sample_batches import MapDataset, SampleBatches
from petra.data.sentences import SentenceData
from petra.data.sources import load_data
from petra.data.stream_batches import StreamBatches
from petra.data.text import TextData
from petra.data.token_files import TokenCounts, TokenData, TokenInfo
from petra.data.tokenization import tokenize
from petra.data.tokenizer import HuggingFaceTokenizer
from petra.data.vocabulary import Vocabulary

__all__ = [
    "BatchSource",
    "Batches",
    "Data",
    "HuggingFaceTokenizer",
    "ImageData",
    "ImageFileData",
    "LoaderBatches",
    "MapDataset",
    "Mixing",
    "ResumableBatchSource",
    "SampleBatches",
    "SentenceData",
    "Split",
    "StreamBatches",
    "TextData",
    "TokenCounts",
    "TokenData",
    "TokenInfo",
    "Vocabulary",
    "batch_count",
    "batch_samples",
    "batch_weight",
    "bits_per_byte",
    "close_batches",
    "decode_image",
    "fingerprint",
    "hub_image_data",
    "image_transform",
    "load_data",
    "make_batches",
    "tokenize",
]
