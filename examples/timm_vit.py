"""A ViT of timm, made reversible and trained with PETRA on four stages.

python examples/timm_vit.py
"""

import argparse

import timm
import torch
from torch import nn

import petra
from petra.data import Batches, load_data
from petra.optim import Muon, muon_groups


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", action="store_true", help="start from the weights of timm, 224 × 224 images")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--data", default="digits", help="digits, or a folder of images")
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    options = parser.parse_args(arguments)
    data = load_data(options.data)
    channels, size = data.arguments["in_channels"], data.arguments["image_size"]
    small = {"img_size": size, "patch_size": size // 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", pretrained=options.pretrained, in_chans=channels,
        num_classes=data.arguments["num_classes"], **({} if options.pretrained else small),
    )  # fmt: skip
    network = petra.make_reversible(vit)
    matrices = {p for p in network.blocks.parameters() if p.ndim == 2}
    train, test = Batches(data, "train", 16), Batches(data, "test", 128)
    epochs = 1 if options.smoke else options.epochs
    trainer = petra.Trainer(
        network, method="petra", stages=4, loss=nn.functional.cross_entropy,  # cut into layers by petra.as_network
        accumulate=8,  # with Muon, transformers need at least twice as many micro-batches per update as stages
        optimizer=lambda p: Muon(muon_groups(p, matrices), lr=0.01, weight_decay=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.01, total_steps=epochs * len(train) // 8 + 1, cycle_momentum=False
        ),
    )  # fmt: skip
    result = trainer.fit(train, test, epochs=epochs)
    torch.save(vit.state_dict(), "vit.pt")  # vit and network share their weights
    return result.test_accuracy or 0.0


if __name__ == "__main__":
    main()
