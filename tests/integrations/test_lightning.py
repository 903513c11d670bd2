"""Lightning: reversible networks with automatic optimization, and `PetraModule`."""

import copy
import warnings

import pytest
import torch
from helpers.libraries import library
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import petra

pytestmark = pytest.mark.slow  # the first test imports Lightning

CROSS_ENTROPY = nn.functional.cross_entropy


@pytest.fixture(scope="module")
def lightning():
    return library("lightning.pytorch")


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        for text in (
            "does not have many workers",
            "callbacks used to create the checkpoint",
            "no `val_dataloader`",
            "set_vital",
            "is not empty",
            "no pre-optimization state",
            "LeafSpec",
        ):
            warnings.filterwarnings("ignore", message=f".*{text}.*")
        yield


class Split(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x):
        x = self.linear(x)
        return x, x


class Join(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, x1, x2):
        return self.linear((x1 + x2) / 2)


def make_network(dropout=0.1):
    torch.manual_seed(0)

    def f():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout))

    return petra.Network(Split(5, 8), *(petra.ReversibleBlock(f(), f()) for _ in range(4)), Join(8, 3))


def make_loader(batches=8, shuffle=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * batches, 5, generator=generator)
    data = TensorDataset(x, x[:, :3].argmax(-1))
    return DataLoader(data, batch_size=4, shuffle=shuffle, generator=torch.Generator().manual_seed(2))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def halve(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5)


OPTIONS = {"loss": CROSS_ENTROPY, "optimizer": sgd, "scheduler": halve}


def plain_loop(network, epochs, loader, **options):
    trainer = petra.Trainer(network, **OPTIONS, **options)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            losses += [result.loss for result in trainer.step(x, y)]
    losses += [result.loss for result in trainer.drain()]
    return trainer, losses


def fit(lightning, module, folder, loader, epochs=2, validation=None, checkpoint=None, **options):
    settings = {"logger": False, "enable_checkpointing": False, "max_epochs": epochs, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, **settings
    )
    trainer.fit(module, loader, validation, ckpt_path=checkpoint)
    return trainer


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_automatic_optimization_of_a_reversible_network(lightning, tmp_path):
    class Module(lightning.LightningModule):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def training_step(self, batch, batch_idx):
            x, y = batch
            return CROSS_ENTROPY(self.network(x), y)

        def configure_optimizers(self):
            return sgd(self.parameters())

    network, expected = make_network(dropout=0.0), make_network(dropout=0.0)
    fit(lightning, Module(network), tmp_path, make_loader(), accumulate_grad_batches=2)
    optimizer = sgd(expected.parameters())
    for _ in range(2):
        for i, (x, y) in enumerate(make_loader()):
            (CROSS_ENTROPY(expected(x), y) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert equal(network, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4},
        {"stages": 3, "accumulate": 2, "method": "delayed"},
        {"stages": 2, "schedule": "1f1b", "accumulate": 4, "clip_norm": 0.1},
    ],
    ids=["petra", "delayed", "1f1b"],
)
def test_petra_module_equals_the_plain_loop(lightning, tmp_path, options):
    from petra.integrations.lightning import PetraModule

    network, expected = make_network(), make_network()
    losses = []

    class Module(PetraModule):
        def training_results(self, results):
            super().training_results(results)
            losses.extend(result.loss for result in results)

    trainer = fit(lightning, Module(network, **OPTIONS, **options), tmp_path, make_loader(), validation=make_loader(2))
    reference, expected_losses = plain_loop(expected, 2, make_loader(), **options)
    assert equal(network, expected)
    assert losses == expected_losses[: len(losses)]
    assert trainer.global_step == reference.stages[-1].updates
    score = reference.evaluate(make_loader(2))
    validated = trainer.validate(trainer.lightning_module, make_loader(2), verbose=False)[0]
    assert validated["val_loss"] == pytest.approx(score.loss)
    assert validated["val_accuracy"] == pytest.approx(score.accuracy)
    assert torch.equal(
        torch.cat(trainer.predict(trainer.lightning_module, make_loader(2))).argmax(-1), predicted(network)
    )


def predicted(network):
    with torch.no_grad():
        return torch.cat([network.eval()(x) for x, _ in make_loader(2)]).argmax(-1)


def test_max_steps_learning_rates_and_logs(lightning, tmp_path):
    from petra.integrations.lightning import PetraModule

    seen = []

    class Seen(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((trainer.global_step, float(trainer.callback_metrics.get("train_loss", -1))))

    logger = lightning.loggers.CSVLogger(tmp_path)
    trainer = fit(
        lightning,
        PetraModule(make_network(), stages=4, **OPTIONS),
        tmp_path,
        make_loader(),
        epochs=-1,
        max_steps=11,
        logger=logger,
        callbacks=[Seen(), lightning.callbacks.LearningRateMonitor()],
        log_every_n_steps=1,
    )
    reference = petra.Trainer(make_network(), stages=4, **OPTIONS)
    expected = []
    for x, y in [batch for _ in range(3) for batch in make_loader()][: len(seen)]:
        expected += [float(result.loss) for result in reference.step(x, y)]
    assert seen[-1][0] == reference.stages[-1].updates == 11
    assert [loss for _, loss in seen if loss >= 0] == expected
    assert trainer.global_step >= 11
    assert len(trainer.optimizers) == 4
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "train_loss" in text
    assert "lr-SGD" in text


@pytest.mark.parametrize("options", [{"stages": 4}, {"stages": 3, "accumulate": 2, "corrections": ["predict"]}])
def test_checkpoints_resume_exactly(lightning, tmp_path, options):
    from petra.integrations.lightning import PetraModule

    expected = make_network()
    plain_loop(expected, 3, make_loader(), **options)
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fit(
        lightning,
        PetraModule(make_network(), **OPTIONS, **options),
        tmp_path,
        make_loader(),
        epochs=3,
        enable_checkpointing=True,
        callbacks=[checkpoint],
    )
    file = tmp_path / "epoch=1.ckpt"
    state = torch.load(file, weights_only=True)
    assert state["petra"]["executor"]["fed"] == 16
    resumed = copy.deepcopy(make_network())
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()
    torch.manual_seed(99)
    fit(lightning, PetraModule(resumed, **OPTIONS, **options), tmp_path, make_loader(), epochs=3, checkpoint=file)
    assert equal(resumed, expected)
    loaded = PetraModule.load_from_checkpoint(file, network=make_network(), **OPTIONS, weights_only=True)
    assert not equal(loaded.network, resumed)


def test_checkpoint_within_an_epoch(lightning, tmp_path):
    from petra.integrations.lightning import PetraModule

    stateful = library("torchdata.stateful_dataloader")

    def loader():
        return stateful.StatefulDataLoader(make_loader().dataset, batch_size=4)

    options = {"stages": 4}
    expected = make_network()
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2, filename="{step}")
    fit(
        lightning,
        PetraModule(expected, **OPTIONS, **options),
        tmp_path,
        loader(),
        epochs=2,
        enable_checkpointing=True,
        callbacks=[checkpoint],
    )
    resumed = make_network()
    fit(
        lightning,
        PetraModule(resumed, **OPTIONS, **options),
        tmp_path,
        loader(),
        epochs=2,
        checkpoint=tmp_path / "step=2.ckpt",
    )
    assert equal(resumed, expected)


def test_mistakes(lightning, tmp_path):
    from petra.integrations.lightning import PetraModule

    with pytest.raises(ValueError, match="device is given, but Lightning chooses"):
        PetraModule(make_network(), device="cpu", **OPTIONS)
    with pytest.raises(ValueError, match="precision is '16-true'"):
        fit(lightning, PetraModule(make_network(), **OPTIONS), tmp_path, make_loader(), precision="16-true")
    with pytest.raises(ValueError, match=r"no petra\.Trainer before fit"):
        PetraModule(make_network(), **OPTIONS).training_step((None, None), 0)


def test_bf16_is_the_autocast_of_the_trainer(lightning, tmp_path):
    from petra.integrations.lightning import PetraModule

    network, expected = make_network(), make_network()
    fit(lightning, PetraModule(network, stages=2, **OPTIONS), tmp_path, make_loader(), precision="bf16-mixed")
    plain_loop(expected, 2, make_loader(), stages=2, autocast=torch.bfloat16)
    assert equal(network, expected)
