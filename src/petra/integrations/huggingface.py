"""Networks of Petra for the `Trainer` of Hugging Face and for Accelerate.

A network of transformers that `petra.make_reversible` has converted needs nothing of this: it is trained as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


class NetworkWithLoss(nn.Module):
    """Calls a network as the `Trainer` of Hugging Face does: with inputs and labels by name, for a loss and logits.

    Args:
        network: The network.
        loss: A function of outputs and labels that returns one number, the mean over samples.
        inputs: The names of the inputs in a batch, in the order in which the network takes them.

    Example:
        ```python
        model = NetworkWithLoss(petra.models.create("rev-vit-s"), nn.functional.cross_entropy)
        transformers.Trainer(model, arguments, train_dataset=images).train()
        ```
    """

    accepts_loss_kwargs = False
    """Read by the `Trainer`: the loss is a mean over a batch, to be divided by `gradient_accumulation_steps`."""

    def __init__(
        self, network: nn.Module, loss: Callable[[Any, Any], Tensor], inputs: Sequence[str] = ("pixel_values",)
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.inputs = tuple(inputs)

    def forward(self, labels: Tensor | None = None, **batch: Tensor) -> dict[str, Any]:
        """Compute logits, and the loss if there are labels.

        Args:
            labels: The targets of the loss.
            **batch: The inputs by name; others are ignored.

        Returns:
            `logits`, and `loss` if there are labels.

        Raises:
            ValueError: If an input is missing.
        """
        missing = [name for name in self.inputs if name not in batch]
        if missing:
            raise ValueError(
                f"the batch has {', '.join(batch) or 'nothing'}, but no {missing[0]}: name the inputs of the network "
                "with NetworkWithLoss(network, loss, inputs=[...]), and set remove_unused_columns=False"
            )
        outputs = self.network(*(batch[name] for name in self.inputs))
        return {"logits": outputs} if labels is None else {"loss": self.loss(outputs, labels), "logits": outputs}
