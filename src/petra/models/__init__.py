"""The networks: plain lists of layers that know nothing about how they are trained.

Start with `registry.py`: names such as `revnet18`, and how to add your own. `listing.json` has what
`petra models` prints, so that it need not import PyTorch. Then read one family:

- Convolutional networks: `revnet.py` and `resnet.py` are the networks of the PETRA paper, with the pieces of
  `convolution.py`. `preact_resnet.py` has those of the RevNet paper and `irevnet.py` the fully invertible ones, with
  the pieces of `preactivation.py`.
- Transformers with one resolution: `vit.py`, `roberta.py` and `gpt.py`. Their blocks are in `transformer.py`, and the
  residual branches of a block in `attention.py`. GPT can have rotary positions (`rotary.py`), and reads a text one
  token at a time with `key_value_cache.py`.
- Transformers with several resolutions: `swin.py` with `window_attention.py`, and `mvit.py` with
  `pooling_attention.py`. `hierarchy.py` has what both share.

`transformer_parts.py` has what all transformers share.
"""

# The order in which networks are registered is the order in which `petra models` lists them.
# isort: off
from petra.models.registry import Entry, create, entries, find, listing, register
from petra.models.revnet import revnet
from petra.models.resnet import resnet
from petra.models.preact_resnet import preact_resnet
from petra.models.irevnet import irevnet
from petra.models.vit import vit
from petra.models.swin import swin
from petra.models.mvit import mvit
from petra.models.roberta import roberta
from petra.models.gpt import gpt
# isort: on

__all__ = [
    "Entry",
    "create",
    "entries",
    "find",
    "gpt",
    "irevnet",
    "listing",
    "mvit",
    "preact_resnet",
    "register",
    "resnet",
    "revnet",
    "roberta",
    "swin",
    "vit",
]
