"""Mistakes get a clear error, and nothing is lost."""

import copy

import pytest
import torch
from helpers.networks import batches, mixed_network, reversible_network
from helpers.trainers import make, same_weights, trained
from torch import nn
from torch.nn.functional import cross_entropy

from petra import METHODS, LayerError, Network, NonFiniteLoss, ReversibleBlock
from petra.distributed.thread_transport import run_together


@pytest.mark.parametrize("method", ["petra", "backprop"])
@pytest.mark.parametrize("stages", [1, 3])
def test_non_finite_loss_stops_with_stage_and_microbatch_and_keeps_the_weights(method, stages):
    network = reversible_network(3)
    trainer = make(
        network, stages=stages, method=method, loss=lambda o, y: cross_entropy(o, y % 4) * (0 / (y < 4)).sum()
    )

    def train():
        for m, (x, y) in enumerate(batches(20)):
            trainer.step(x, y + 4 * (m == 9))

    with pytest.raises(NonFiniteLoss, match=rf"micro-batch 9 on stage {stages - 1} is (nan|inf)"):
        train()
    assert all(torch.isfinite(value).all() for value in network.state_dict().values())


@pytest.mark.parametrize("stages", [1, 3])
def test_of_stages_that_predict_gradients_it_is_told_that_they_were_updated(stages):
    network = reversible_network(3)
    lost = lambda o, y: cross_entropy(o, y % 4) + (0 / (y < 4)).sum()  # noqa: E731
    trainer = make(network, stages=stages, method="dni", loss=lost)
    *before, (x, y) = batches(4)
    for good in before:
        trainer.step(*good)
    twin = copy.deepcopy(network)
    said = ("no weights were updated", "stages below were updated with predicted gradients")
    with pytest.raises(NonFiniteLoss, match=said[stages > 1]):
        trainer.step(x, y + 4)
    same = [torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True)]
    assert all(same) == (stages == 1)


def test_bad_inputs_are_refused_before_anything_is_touched():
    network = reversible_network(3)
    twin = copy.deepcopy(network)
    trainer = make(network, stages=3)
    for m, (x, y) in enumerate(batches(12)):
        if m % 4 == 1:
            with pytest.raises(ValueError, match=r"micro-batch \d+ contains NaN or infinity"):
                trainer.step(x * torch.inf, y)
            with pytest.raises(ValueError, match=r"micro-batch \d+ has no samples: leave it out"):
                trainer.step(x[:0], y[:0])
        trainer.step(x, y)
    trainer.drain()
    assert same_weights(network, trained(twin, ticks=12, stages=3))


class TwoStreams(nn.Module):
    def forward(self, x):
        return x, x


class TestErrors:
    def test_layers_that_cannot_take_their_input(self):
        trainer = make(mixed_network(), stages=2)
        with pytest.raises(LayerError, match=r"layer 0 \(Split\) cannot take inputs of shape \(3, 5, 4, 4\)"):
            trainer.step(torch.randn(3, 5, 4, 4), torch.zeros(3, dtype=torch.long))
        with pytest.raises(LayerError, match=r"inputs of shape \(3, 4, 4, 4\) in float64: "):
            make(mixed_network(), stages=2).step(torch.randn(3, 4, 4, 4).double(), torch.zeros(3, dtype=torch.long))

    def test_the_layer_of_a_residual_function_and_what_to_do_with_two_streams_are_named(self):
        block = ReversibleBlock(nn.Conv2d(4, 4, 1), nn.Conv2d(3, 4, 1))
        said = r"layer 1 \(Conv2d in ReversibleBlock\) cannot take inputs of shape \(3, 4, 4, 4\), \(3, 4, 4, 4\): "
        with pytest.raises(LayerError, match=said):
            make(Network(TwoStreams(), block)).step(torch.randn(3, 4, 4, 4), torch.zeros(3, dtype=torch.long))
        said = r"layer 1 \(Flatten\) .* 3 were given; it gets 2 streams: let its forward take them, or join them in a"
        with pytest.raises(LayerError, match=said):
            make(Network(TwoStreams(), nn.Flatten())).step(torch.randn(3, 4, 4, 4), torch.zeros(3, dtype=torch.long))

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_batch_norm_on_a_batch_of_one(self, method):
        network = Network(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 4))
        trainer = make(network, stages=1, method=method)
        said = r"layer 1 \(BatchNorm2d\) cannot take inputs of shape \(1, 2, 1, 1\): .* more than 1 value .*drop_last"
        with pytest.raises(LayerError, match=said):
            trainer.step(torch.randn(1, 2, 4, 4), torch.zeros(1, dtype=torch.long))
        with pytest.raises(LayerError, match=r"layer 1 \(BatchNorm2d\) cannot .* expected 4D input"):
            make(Network(nn.Flatten(), nn.BatchNorm2d(2))).step(torch.randn(3, 2), torch.zeros(3, dtype=torch.long))

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_a_layer_that_reads_its_own_parameter_from_a_list(self, method):
        class Listed(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.weights = [self.linear.weight]

            def forward(self, x):
                return x @ self.weights[0]

        trainer = make(Network(nn.Linear(4, 4), Listed(), nn.Linear(4, 4)), stages=3, method=method)

        def train():
            for _ in range(6):
                trainer.step(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))

        if method != "ddg":
            return train()
        with pytest.raises(LayerError, match=r"layer 1 \(Listed\) reads a parameter of shape \(4, 4\) from elsewhere"):
            train()

    def test_a_synthesizer_on_a_batch_of_one(self):
        network = Network(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 4, 1), nn.Sequential(nn.Flatten(), nn.Linear(4, 4)))
        with pytest.raises(
            ValueError, match=r"dni cannot predict gradients for the inputs of layer 2, of shape \(1, 4, 1, 1\): .*ba"
        ):
            make(network, stages=[2, 1], method="dni").step(torch.randn(1, 2, 4, 4), torch.zeros(1, dtype=torch.long))

    def test_targets_of_another_length_are_refused_and_nothing_is_lost(self):
        trainer = make(mixed_network())
        with pytest.raises(ValueError, match="3 inputs but 4 targets"):
            trainer.step(torch.randn(3, 2, 4, 4), torch.zeros(4, dtype=torch.long))
        trainer.step(torch.randn(3, 2, 4, 4), torch.zeros(3, dtype=torch.long))

    def test_samples_may_come_second(self):
        class Last(nn.Linear):
            def forward(self, x):
                return super().forward(x[-1])

        (finished,) = make(Network(Last(6, 4))).step(torch.randn(7, 3, 6), torch.randint(4, (3,)))  # time comes first
        assert finished.outputs.shape == (3, 4)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "petr"}, "no method named 'petr': did you mean 'petra'"),
            ({"stages": 7}, "stages is 7, but the network has only 6 layers"),
            ({"stages": 0}, "stages is 0"),
            ({"stages": [3, 4]}, "add up to the network's 6, not 7"),
            ({"stages": [2, 0, 4]}, "must be 1 or more and add up to the network's 6$"),
            ({"accumulate": 0}, "accumulate is 0"),
            ({"schedule": "low"}, "no schedule named 'low'"),
            ({"method": "backprop", "schedule": "lock-step"}, "backprop computes exact gradients"),
            ({"stages": 2, "schedule": [2, 1, 0]}, "3 numbers for 2 stages"),
            ({"stages": 2, "schedule": [1.5, 0]}, r"in_flight is \[1.5, 0\], .*: give integers"),
            ({"clip_norm": 0.0}, "clip_norm is 0.0"),
            ({"clip_norm": float("nan")}, "clip_norm is nan"),
            ({"autocast": torch.int8}, r"autocast is torch\.int8: give a dtype like torch\.bfloat16"),
            ({"comm_dtype": torch.int8}, r"comm_dtype is torch\.int8: give a name like 'int8'"),
            ({"comm_dtype": "int4"}, "there is no codec named 'int4'"),
            ({"optimizer": lambda parameters: None}, "the optimizer function returns a NoneType: return the optimizer"),
            ({"scheduler": lambda optimizer: None}, "the scheduler function returns a NoneType: return the scheduler"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(mixed_network(), **options)

    def test_layers_that_write_into_their_input(self):
        class Halve(nn.Module):
            def forward(self, x):
                return x.mul_(0.5)

        x, y = torch.randn(3, 4), torch.randint(4, (3,))
        for network in (
            Network(Halve(), nn.Linear(4, 4)),
            Network(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        ):
            for method in METHODS:
                trainer = make(network, method=method, stages=len(network))
                with pytest.raises(LayerError, match=r"changes its input in place.*inplace=False"):
                    [trainer.step(x, y) for _ in range(6)]

    def test_a_layer_that_fails_without_a_word(self):
        class Unwritten(nn.Module):
            def forward(self, x):
                raise NotImplementedError

        with pytest.raises(LayerError, match=r"layer 0 \(Unwritten\) cannot take .* NotImplementedError"):
            make(Network(Unwritten())).step(torch.randn(3, 4), torch.randint(4, (3,)))

    def test_a_tick_that_stopped_half_way_says_so(self):
        trainer = make(mixed_network(), stages=3)
        data = list(batches(4))
        for x, y in data[:2]:
            trainer.step(x, y)
        good = copy.deepcopy(trainer.state_dict())
        with pytest.raises(LayerError):
            trainer.step(torch.randn(3, 5, 4, 4), data[2][1])
        for call in (lambda: trainer.step(*data[2]), trainer.drain, trainer.state_dict):
            with pytest.raises(RuntimeError, match=r"failed half-way \(LayerError: layer 0"):
                call()
        trainer.load_state_dict(good)
        trainer.step(*data[2])
        trainer.drain()

    def test_nothing_is_left_of_a_tick_that_was_stopped_between_a_loss_and_its_gradient(self):
        trainer = make(mixed_network(), stages=3)
        data = list(batches(4))
        trainer.step(*data[0])
        good = copy.deepcopy(trainer.state_dict())

        def stop(tick, action, stage):
            if stage.last:
                raise KeyboardInterrupt

        trainer.executor.observers.append(stop)
        with pytest.raises(KeyboardInterrupt):
            [trainer.step(x, y) for x, y in data[1:]]
        trainer.executor.observers.clear()
        trainer.load_state_dict(good)
        trainer.state_dict()

    def test_optimizers_and_schedulers_that_a_pipeline_cannot_drive(self):
        with pytest.raises(ValueError, match="LBFGS"):
            make(mixed_network(), optimizer=torch.optim.LBFGS)
        with pytest.raises(ValueError, match="ReduceLROnPlateau"):
            make(mixed_network(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)

    def test_optimizers_of_more_than_their_stage(self):
        network = mixed_network()
        with pytest.raises(
            ValueError, match="has parameters of other stages: create it from the parameters that the function is"
        ):
            make(network, stages=2, optimizer=lambda _: torch.optim.SGD(network.parameters(), 0.1))
        network[0].requires_grad_(False)
        make(network, optimizer=lambda _: torch.optim.SGD(network.parameters(), 0.1))  # one stage, frozen ones too

    def test_weights_that_are_unfrozen_too_late(self):
        data = list(batches(3))
        network = mixed_network()
        network[0].requires_grad_(False)
        trainer = make(network, stages=2)
        trainer.step(*data[0])
        network[0].requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"0\.body\.0\.weight was frozen when .*: freeze it again, or create a new Train"
        ):
            trainer.step(*data[1])
        network[0].requires_grad_(False)
        trainer.step(*data[1])
        network[0].requires_grad_(True)
        trainer.stages[0].optimizer.add_param_group({"params": list(network[0].parameters())})
        trainer.step(*data[2])
        trainer.drain()

    def test_weights_that_the_optimizer_leaves_out_stay_out(self):
        def optimizer(parameters):
            return torch.optim.SGD([p for p in parameters if p.ndim > 1], 0.1)

        trained(mixed_network(), ticks=3, optimizer=optimizer)

    def test_losses_of_more_than_the_outputs(self):
        network = mixed_network()
        trainer = make(network, loss=lambda o, y: o.mean() + sum(p.abs().sum() for p in network.parameters()))
        with pytest.raises(ValueError, match=r"depends on a tensor of shape .* use it in a layer, use weight_decay"):
            trainer.step(*next(iter(batches(1))))

    def test_losses_of_nothing(self):
        trainer = make(mixed_network(), loss=lambda o, y: nn.functional.cross_entropy(o.detach(), y))
        with pytest.raises(ValueError, match="the loss does not depend on the outputs of the network"):
            trainer.step(*next(iter(batches(1))))

    @pytest.mark.parametrize("options", [{"stages": 3}, {"stages": 1}, {"method": "backprop", "stages": 2}])
    def test_losses_that_do_not_fit_on_the_first_batch(self, options):
        network = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        tokens = torch.randint(9, (2, 5))
        trainer = make(network, **options)
        with pytest.raises(
            ValueError,
            match=r"the loss fails on outputs of shape \(2, 5, 9\) and targets of shape \(2, 5\): .* so give "
            r"loss=lambda outputs, targets: cross_entropy\(outputs.flatten\(0, 1\), targets.flatten\(\)\)",
        ):
            trainer.step(tokens, tokens)
        trainer = make(network, loss=lambda o, y: nn.functional.mse_loss(o, y, reduction="none"), **options)
        with pytest.raises(ValueError, match=r"the loss has shape \(2, 5, 9\): return one number"):
            trainer.step(tokens, torch.zeros(2, 5, 9))

    def test_losses_that_do_not_fit_on_ranks(self):
        def work(transport):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
            trainer = make(network, method="delayed", stages=3, transport=transport)
            tokens = torch.zeros(2, 5, dtype=torch.long)
            with pytest.raises((ValueError, RuntimeError), match=r"the loss fails on outputs of shape \(2, 5, 9\)"):
                trainer.step(tokens, tokens)
            return trainer.executor.microbatches

        assert run_together(work, ranks=2) == [0, 0]

    def test_networks_that_are_not_lists_of_layers(self):
        with pytest.raises(ValueError, match=r"network is a list: give an nn.Module"):
            make([nn.Linear(2, 2)])
        network = mixed_network()
        network.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
        with pytest.raises(ValueError, match="Network has its own hooks"):
            make(network)

    def test_weights_shared_between_stages(self):
        layer = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="is shared by stages 0 and 2"):
            make(Network(layer, nn.ReLU(), layer), stages=3)

    def test_nothing_to_evaluate(self):
        with pytest.raises(ValueError, match=r"nothing to evaluate, because there are no test batches$"):
            make(mixed_network()).evaluate([])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"loss": "cross_entropy"}, "loss is 'cross_entropy': give a function"),
            ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss has shape \(3,\): return one number"),
            ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)}, "optimizer is a SGD.*lambda"),
            ({"scheduler": "cosine"}, "scheduler is a str.*lambda"),
            ({"accumulate": 1.5}, "accumulate is 1.5: give a whole number"),
            ({"autocast": "bf16"}, "autocast is 'bf16': give a dtype"),
            ({"device": "cuda:99"}, "device is cuda:99, but this machine has no such GPU"),
            ({"stages": "3"}, "stages is '3': give a whole number"),
            ({"stages": 2.5}, "stages is 2.5: give a whole number"),
            ({"stages": 2, "schedule": [2, 1, 0]}, "schedule has 3 numbers for 2 stages"),
        ],
    )
    def test_parts_of_another_kind(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(mixed_network(), **options).step(torch.randn(3, 2, 4, 4), torch.zeros(3, dtype=torch.long))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"schedule": 3}, "schedule is 3: give a name, or the number in flight of each stage"),
            ({"corrections": [3]}, "3 is not a correction: give a name like predict, or an object of petra"),
            ({"comm_dtype": 8}, "comm_dtype is 8: give a name like 'int8', a dtype like torch.bfloat16"),
            ({"clip_norm": "1"}, "clip_norm is '1': give a positive norm"),
        ],
    )
    def test_kinds_that_would_fail_later_or_without_a_word(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(reversible_network(3), stages=3, **options)

    def test_states_that_are_none_of_a_trainer(self):
        trainer = make(reversible_network(3), stages=3)
        for state in ({}, trainer.network.state_dict()):
            for load in (trainer.load_state_dict, trainer.load_drained):
                with pytest.raises(ValueError, match=r"give the state_dict\(\) of a Trainer"):
                    load(state)

    def test_couplings_that_are_none(self):
        with pytest.raises(ValueError, match=r"coupling is 'exact': give a class like petra.FixedPoint"):
            Network(*reversible_network(3)).use_coupling("exact")

    def test_inputs_that_are_no_tensors(self):
        inputs, targets = torch.randn(3, 2, 4, 4), torch.zeros(3, dtype=torch.long)
        with pytest.raises(ValueError, match="a ndarray where streams should be: give a tensor"):
            make(mixed_network()).step(inputs.numpy(), targets)
        with pytest.raises(ValueError, match="a str where streams should be: give a tensor"):
            make(mixed_network()).evaluate([{"inputs": inputs, "targets": targets}])
        with pytest.raises(ValueError, match="a tuple with a tuple in it where streams should be"):
            make(nn.Sequential(nn.LSTM(4, 3))).step(torch.randn(5, 3, 4), targets)

    def test_names_in_capitals(self):
        with pytest.raises(ValueError, match="no method named 'PETRA': did you mean 'petra'"):
            make(mixed_network(), method="PETRA")
