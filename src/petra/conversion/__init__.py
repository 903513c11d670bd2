"""Networks of other libraries with their residual blocks made reversible.

Start with `convert.py`: `make_reversible` finds segments of residual blocks in a network and converts them. Then:

- `block_spec.py`: `BlockSpec`, how to recognise a block and what its two residual functions are.
- `known_blocks.py`: the blocks of PyTorch, timm and Hugging Face transformers that are recognised.
- `residual_views.py`: residual functions as modules that refer to the block's own submodules.
- `converted_segment.py`: a segment of converted blocks, called like one block.
- `blended.py`: the coupling that starts from the function that the network had.
- `container.py`: `ReversibleBlocks`, which replaces an `nn.Sequential` or `nn.ModuleList`.
- `report.py`: a report of what was converted.
- `hidden_outputs.py`: refuses hidden states and attention maps, which converted networks do not have.

`as_network.py` turns a module, converted or not, into a `petra.Network` that a trainer can cut into stages:

- `module_network.py`: the network, with the names of the module.
- `part.py`: parts of a `forward` as layers. `segment_layers.py`, `chain.py`: converted segments as layers.
- `hf_chain.py`: networks of Hugging Face transformers. `traced_chain.py`: other modules, traced with `torch.fx`.
"""

from petra.conversion.as_network import as_network
from petra.conversion.container import ReversibleBlocks
from petra.conversion.convert import make_reversible, set_blend
from petra.conversion.module_network import ModuleNetwork
from petra.conversion.report import ConversionReport, SegmentReport, conversion_report

__all__ = [
    "ConversionReport",
    "ModuleNetwork",
    "ReversibleBlocks",
    "SegmentReport",
    "as_network",
    "conversion_report",
    "make_reversible",
    "set_blend",
]
