"""Defaults that follow from the staleness, and warnings that agree with trainings that were measured."""

import warnings
from math import log, sqrt
from types import SimpleNamespace

import pytest
import torch
from helpers.scripts import import_scripts
from torch import nn

import petra
from petra import methods, models
from petra.corrections import choose
from petra.pipeline import MicrobatchResult
from petra.runs.config import RunConfig
from petra.runs.model_arguments import outline
from petra.runs.recipes import RECIPES
from petra.trainer import optimizers
from petra.trainer.defaults import WarmupAndDecay
from petra.trainer.loss_watch import LossWatch
from petra.trainer.schedules import choose_schedule
from petra.trainer.stability import Steps, has_attention, is_transformer, staleness_warning

PETRA = methods.find("petra")


def convolutional():
    return models.create("revnet18", in_channels=1, num_classes=4, width=4, depths=(1, 1, 1))


def transformer():
    return models.create("rev-gpt", width=8, depth=4, heads=2, vocab_size=8, seq_len=4)


def optimizer_of(name, lr, momentum=0.9, warm_up=True):
    weights = [nn.Parameter(torch.ones(3, 3))]
    made = {
        "sgd": lambda: torch.optim.SGD(weights, lr, momentum=momentum),
        "adamw": lambda: torch.optim.AdamW(weights, lr),
        "nadamw": lambda: optimizers.nadamw(weights, lr=lr),
        "soap": lambda: petra.optim.SOAP(weights, lr),
        "muon": lambda: petra.optim.Muon(weights, lr),
        "rmsprop": lambda: torch.optim.RMSprop(weights, lr),
    }[name]()
    torch.optim.lr_scheduler.LambdaLR(made, lambda update: min(1, (update + 1) / 100) if warm_up else 1)
    return made


def warned(optimizer, stages, k, schedule="low-staleness", corrections=(), transformer=False, attention=False):
    chosen = choose_schedule(PETRA, stages, k, schedule)
    return staleness_warning([optimizer], chosen, choose(corrections), transformer, attention)


@pytest.mark.parametrize(
    ("measured", "lr", "stages", "k", "schedule", "warm_up", "speaks"),
    [
        ("benchmarks/guidance: 15 to 60 % instead of 88 %", 0.1, 8, 1, "low-staleness", False, True),
        ("benchmarks/guidance: no better with a warm-up", 0.1, 8, 1, "low-staleness", True, True),
        ("benchmarks/guidance: learns slowly", 0.02, 8, 1, "low-staleness", True, False),
        ("RevNet-18, Table 2: 94.2 % instead of 94.3 %", 0.2, 10, 8, "lock-step", True, False),
        ("RevNet-18, k = 1: 90.1 % instead of 92.4 %", 0.025, 10, 1, "lock-step", True, False),
        ("RevNet-18, k = 1: 91.6 % instead of 92.4 %", 0.025, 10, 1, "low-staleness", True, False),
        ("RevNet-50: 92.7 % instead of 93.9 %", 0.2, 18, 8, "lock-step", True, True),
        ("RevNet-50: 94.1 % instead of 93.9 %", 0.2, 18, 8, "low-staleness", True, False),
        ("benchmarks/prediction: 93.8 % instead of 97.8 %", 0.4, 18, 8, "low-staleness", True, True),
        ("README", 0.1, 4, 1, "low-staleness", True, False),
        ("exact gradients", 5.0, 8, 8, "1f1b", False, False),
    ],
)
def test_the_rule_for_sgd_agrees_with_measured_trainings(measured, lr, stages, k, schedule, warm_up, speaks):
    found = warned(optimizer_of("sgd", lr, warm_up=warm_up), stages, k, schedule)
    assert (found is not None) == speaks, measured


@pytest.mark.parametrize(
    ("name", "k", "speaks"),
    [
        ("adamw", 1, True),
        ("adamw", 8, True),
        ("adamw", 16, True),  # 0.4 nats behind
        ("adamw", 31, True),
        ("adamw", 32, False),  # 0.05 nats behind
        ("nadamw", 8, True),
        ("muon", 1, True),
        ("muon", 4, True),  # 0.13 nats behind
        ("muon", 8, True),  # 0.035 nats behind
        ("muon", 15, True),
        ("muon", 16, False),  # 0.01 nats behind
        ("soap", 16, False),
        ("sgd", 31, True),
        ("sgd", 32, False),
        ("rmsprop", 1, False),  # no rule
    ],
)
def test_the_rule_for_transformers_agrees_with_measured_trainings(name, k, speaks):
    found = warned(optimizer_of(name, 1e-3), 8, k, transformer=True, attention=True)
    assert (found is not None) == speaks
    assert name == "rmsprop" or warned(optimizer_of(name, 1e-3), 8, k) is None  # there is a rule for transformers only


def test_corrections_and_a_synchronous_start_count():
    fast = optimizer_of("sgd", 0.1)
    assert warned(fast, 8, 1)
    assert warned(fast, 8, 1, corrections=["predict", "inertia:4"]) is None
    assert warned(fast, 8, 1, corrections=["damp:4"]) is None
    late = choose_schedule(PETRA, 8, 1, None, flush_until=100)
    assert "stage 0 are 7 updates late" in staleness_warning([fast], late, [], False)  # after the start


def test_the_warning_gives_values():
    text = warned(optimizer_of("sgd", 0.1, warm_up=False), 8, 1)
    for part in ("7 updates late", "lr=0.02 ", "warm-up of 200", "accumulate=5 ", "'inertia:4'", "schedule='1f1b'"):
        assert part in text
    assert warned(optimizer_of("sgd", 0.02), 8, 1) is None  # the advice is good
    text = warned(optimizer_of("sgd", 1e6), 8, 1)
    assert "lr=0.02 and a warm-up of 200 updates, or schedule='1f1b'" in text  # and no k of a million
    text = warned(optimizer_of("adamw", 1e-3), 8, 4, transformer=True)
    for part in ("Muon and accumulate=16", "accumulate=32 with Adam", "schedule='1f1b' and accumulate=32 for exact"):
        assert part in text
    assert warned(optimizer_of("adamw", 1e-3), 8, 32, transformer=True) is None
    text = warned(optimizer_of("muon", 1e-3), 4, 4, "lock-step", transformer=True)  # seven ticks for four stages
    assert "give accumulate=14, or schedule='1f1b' and accumulate=16" in text
    assert warned(optimizer_of("muon", 1e-3), 4, 14, "lock-step", transformer=True) is None
    assert "Muon and accumulate=16, or schedule" in warned(optimizer_of("sgd", 1e-3), 8, 1, attention=True)
    assert warned(optimizer_of("sgd", 1e-3), 8, 1, transformer=True) is None  # an MLP with LayerNorm
    assert "no warm-up" not in warned(optimizer_of("sgd", 0.2), 8, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_cause_no_warning(name):
    config = RunConfig.from_options(name, {"data": "digits"})
    network = outline(config.model, config.model_options)
    optimizer = config.make_optimizer([nn.Parameter(torch.ones(2, 2))])
    config.curve(500).scheduler(optimizer)
    method = methods.find(config.method)
    schedules = {config.schedule, "low-staleness"} if config.method == "petra" else {config.schedule}
    for given in schedules:
        schedule = choose_schedule(method, config.stages, config.accumulate, given)
        kinds = is_transformer(network), has_attention(network)
        assert staleness_warning([optimizer], schedule, [], *kinds) is None


def test_which_networks_are_transformers():
    assert is_transformer(transformer())
    assert has_attention(transformer())
    assert not has_attention(convolutional())
    assert is_transformer(models.create("rev-vit-s", width=8, depth=1, heads=1, image_size=32, patch=16))
    assert not is_transformer(convolutional())
    assert not is_transformer(nn.Sequential(nn.Linear(2, 2)))


def test_what_schedulers_of_torch_tell_about_the_peak():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1, momentum=0.5)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10, cycle_momentum=False)
    steps = Steps.of(optimizer)
    assert (steps.lr, steps.warm_up, steps.effective_lr) == (0.3, True, 0.6)


def test_the_trainer_warns_before_training_and_nowhere_else():
    options = {"loss": nn.functional.cross_entropy, "stages": 5}
    with pytest.warns(petra.StalenessWarning, match="stage 0 are 4 updates late") as found:
        petra.Trainer(convolutional(), optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.9), **options)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        petra.Trainer(convolutional(), optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), **options)
        petra.Trainer(convolutional(), method="backprop", **options | {"stages": 1})
        petra.Trainer(convolutional(), **options)
    with pytest.warns(petra.StalenessWarning, match="transformers learn badly from late gradients: give Muon"):
        petra.Trainer(transformer(), optimizer=torch.optim.AdamW, **options)


def test_without_an_optimizer_the_defaults_are_those_written_out():
    """A trainer with the defaults is bit for bit the one that has them as arguments."""

    def trained(**options):
        torch.manual_seed(0)
        net = convolutional()
        trainer = petra.Trainer(net, loss=nn.functional.cross_entropy, stages=5, **options)
        for _ in range(12):
            trainer.step(torch.randn(4, 1, 4, 4), torch.randint(4, (4,)))
        trainer.drain()
        return trainer, net.state_dict()

    trainer, found = trained()
    assert (trainer.defaults.optimizer, trainer.defaults.warmup) == ("sgd", 200)
    assert "after 200 updates of warm-up" in str(trainer.defaults)
    given, expected = trained(
        optimizer=lambda p: optimizers.sgd(p, lr=0.025, weight_decay=5e-4),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda u: min((u + 1) / 200, sqrt(200 / (u + 1)))),
        corrections=["predict", "inertia:4"],
    )
    assert given.defaults is None
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_given_is_not_changed():
    options = {"loss": nn.functional.cross_entropy, "stages": 5}
    plain = petra.Trainer(convolutional(), optimizer=lambda p: torch.optim.SGD(p, 0.01), **options)
    assert plain.defaults is None
    assert not plain.corrections
    assert all(stage.scheduler is None for stage in plain.stages)
    own = petra.Trainer(convolutional(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 7), **options)
    assert all(stage.scheduler.step_size == 7 for stage in own.stages)
    assert not petra.Trainer(convolutional(), corrections=(), **options).corrections
    assert not petra.Trainer(convolutional(), schedule="1f1b", accumulate=5, **options).corrections
    assert not petra.Trainer(convolutional(), method="reversible", **options | {"stages": 1}).corrections


@pytest.mark.filterwarnings("ignore::petra.StalenessWarning")
def test_defaults_of_transformers():
    options = {"loss": nn.functional.cross_entropy, "stages": 5}
    for k, lr in ((1, 1e-3), (5, 2e-3)):
        trainer = petra.Trainer(transformer(), accumulate=k, **options)
        assert [type(stage.optimizer) for stage in trainer.stages] == [petra.optim.Muon] * 5
        assert trainer.defaults.lr == lr
        assert any(g["orthogonalize"] for stage in trainer.stages for g in stage.optimizer.param_groups)


def test_the_warm_up_is_as_long_as_the_longest_momentum():
    stages = {}
    for count in (5, 8):
        layers = [nn.Linear(2, 2) for _ in range(count)]
        trainer = petra.Trainer(nn.Sequential(*layers), loss=nn.functional.cross_entropy, stages=count)
        stages[count] = trainer.defaults.warmup
    assert stages == {5: 200, 8: 200}
    layers = [nn.Linear(2, 2) for _ in range(12)]
    trainer = petra.Trainer(nn.Sequential(*layers), loss=nn.functional.cross_entropy, stages=12)
    assert trainer.defaults.warmup == 4 * 11**2
    curve = WarmupAndDecay(4)
    assert [curve(update) for update in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert curve(15) == 0.5


def watch(losses, classes=4, scheduled=None):
    """Feed a `LossWatch` with one loss per update; return when it spoke, and what it said."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scheduled or (lambda update: 1.0))
    stage = SimpleNamespace(updates=0, optimizer=optimizer)
    watched, found = LossWatch(stage), {}
    outputs, targets = torch.zeros(2, classes), torch.zeros(2, dtype=torch.long)
    for number, loss in enumerate(losses):
        optimizer.step()
        scheduler.step()
        stage.updates = number + 1
        text = watched.observe([MicrobatchResult(number, torch.tensor(loss), outputs, targets)])
        if text:
            found[number + 1] = text
    return found


def test_a_loss_that_stays_at_guessing_is_noticed_once():
    found = watch([log(4)] * 2000)
    assert list(found) == [150]
    assert found[150] == "after 150 updates the training loss is 1.39, and that of guessing is 1.39"
    assert list(watch([1.3] * 100 + [1.0] * 1000 + [1.4] * 200)) == [1200]  # it falls, and comes back


@pytest.mark.parametrize(("share", "when"), [(1.02, 150), (0.97, 200), (0.92, 300), (0.88, None)])
def test_a_loss_must_have_fallen_further_the_later_it_is(share, when):
    assert list(watch([2.0] * 8 + [share * log(4)] * 1300)) == ([] if when is None else [when])


def test_a_loss_that_falls_or_starts_low_is_left_alone():
    assert not watch([log(4) * 0.997**n for n in range(1300)])
    assert not watch([0.1] * 1300)  # fine-tuning
    assert not watch([0.1] * 8 + [0.2] * 250 + [0.05] * 1000)  # … may begin with larger losses
    assert list(watch([0.1] * 100 + [0.2] * 300)) == [300]
    assert not watch([5.0] * 1300, classes=1)  # a regression whose loss is constant is not judged


def test_nothing_is_judged_during_the_warm_up():
    assert list(watch([log(4)] * 1300, scheduled=lambda update: min(1, update / 1000))) == [600]


def test_a_training_that_does_not_learn_warns_once():
    torch.manual_seed(0)
    trainer = petra.Trainer(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)),
        method="delayed",
        stages=2,
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 1e-6, momentum=0.9),
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(320):
            trainer.step(torch.zeros(2, 2), torch.randint(3, (2,)))
    assert len(found) == 1
    assert found[0].category is petra.StalenessWarning
    assert "after 150 updates the training loss is" in str(found[0].message)
    assert "stage 0 are 1 updates late" in str(found[0].message)


def test_the_warning_says_that_a_given_optimizer_has_no_corrections():
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 3)]
    trainer = petra.Trainer(nn.Sequential(*layers), method="delayed", stages=2, loss=nn.functional.cross_entropy)
    for stage in trainer.stages:
        stage.scheduler = None
        for group in stage.optimizer.param_groups:
            group.update(lr=1e-6, initial_lr=1e-6)  # learns nothing
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(220):
            trainer.step(torch.zeros(2, 2), torch.randint(3, (2,)))
    text = str(found[0].message)
    assert "(with corrections=['predict', 'inertia:4'], because a given optimizer has none)" in text
    assert "an optimizer with lr=2e-07 and a warm-up of 200 updates" in text


def test_the_learning_rate_of_a_run_that_sets_none():
    def config(**options):
        return RunConfig(model="revnet18", data="digits", **options)

    assert config(batch_size=64).base_lr == 0.025
    assert config(batch_size=256, method="reversible").base_lr == 0.1
    assert config(batch_size=256, stages=8, schedule="1f1b").base_lr == 0.1
    assert config(batch_size=256, stages=8).base_lr == pytest.approx(0.95 * 5 * 0.1 / 7)
    assert config(batch_size=256, stages=8, lr=0.1).base_lr == 0.1
    assert config(batch_size=256, stages=8, corrections=("predict", "inertia:4")).base_lr == 0.1


def test_the_benchmark_s_cases():
    (benchmark,) = import_scripts("benchmarks/guidance", "run")
    for case, options in benchmark.CASES.items():
        speaks = options.get("method") != "reversible" and options.get("lr", 0.1) == 0.1
        speaks &= not options.get("corrections")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            benchmark.make_trainer(benchmark.make_network(width=2), **options)
        assert bool(found) == speaks, case
