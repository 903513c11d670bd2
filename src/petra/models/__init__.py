"""The networks: lists of layers, ignorant of how they are trained."""

from petra.models.classic import classic
from petra.models.gpt import gpt
from petra.models.irevnet import irevnet
from petra.models.mvit import mvit
from petra.models.registry import Entry, create, entries, find, register
from petra.models.resnet import resnet
from petra.models.revnet import revnet
from petra.models.roberta import roberta
from petra.models.swin import swin
from petra.models.vit import vit

__all__ = [
    "Entry",
    "classic",
    "create",
    "entries",
    "find",
    "gpt",
    "irevnet",
    "mvit",
    "register",
    "resnet",
    "revnet",
    "roberta",
    "swin",
    "vit",
]
