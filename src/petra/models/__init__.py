"""The networks: lists of layers, ignorant of how they are trained."""

from petra.models.mvit import mvit
from petra.models.registry import Entry, create, entries, find, register
from petra.models.resnet import resnet
from petra.models.revnet import revnet
from petra.models.swin import swin

__all__ = ["Entry", "create", "entries", "find", "mvit", "register", "resnet", "revnet", "swin"]
