"""Training runs in a folder.

Start with `run.py`: one run from its configuration to its summary; its loop is that of `petra.trainer.loop`.
`config.py` checks and merges its options, which are the fields in `run_options.py`, with those of `recipes.py`;
`option_fields.py` says what a field carries. `trainer_setup.py` builds the trainer, and `resume.py` restores it from a
checkpoint.
`run_folder.py` names the files of a run, `file_hashes.py` reads, writes and checks them, and `summary.py` describes it.
For a finished run, `trained_network.py` loads
its network from `weight_files.py`, `run_evaluation.py` tests it and `generation.py` writes text with it.
`model_arguments.py` connects networks and data.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petra.runs.trained_network import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import `load` when it is used (PEP 562): it needs the trainer, which `petra models` does not."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from petra.runs.trained_network import load

    return load
