"""Modules of other libraries as networks of layers: the same outputs, the same training, the same names."""

import copy

import pytest
import torch
from helpers.libraries import library
from helpers.library_networks import (
    IDS,
    IMAGES,
    KEEP,
    TIMM,
    TRANSFORMERS,
    outputs_of,
    timm_network,
    transformer,
    without_dropout,
)
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra.distributed.thread_transport import run_together


def inputs_for(name):
    return [(IMAGES,)] if "Image" in name else [(IDS,), (IDS * KEEP, KEEP)]


def check_outputs(module, network, inputs, tolerance=1e-12):
    """Compare outputs in evaluation mode, and with the same random numbers in training mode."""
    for training in (False, True):
        network.train(training)
        torch.manual_seed(1)
        expected = outputs_of(module, *inputs)
        torch.manual_seed(1)
        found = network(*inputs)
        if len(inputs) == 2 and found.shape[:2] == KEEP.shape:  # the rest is padding
            found, expected = found[KEEP == 1], expected[KEEP == 1]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class TestTransformers:
    @pytest.mark.parametrize("converted", [False, True])
    @pytest.mark.parametrize("name", TRANSFORMERS)
    def test_outputs(self, name, converted):
        module = transformer(name)
        module = petra.make_reversible(module) if converted else module
        network = petra.as_network(module)
        assert len(network) in (4, 5)  # without a norm or a head, the end is a part of the last block's layer
        assert sum(isinstance(layer, petra.ReversibleLayer) for layer in network) == 3 * converted
        for inputs in inputs_for(name):
            check_outputs(module, network, inputs)

    @pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MistralForCausalLM", "BertModel"])
    def test_eager_attention(self, name):
        module = transformer(name, attn_implementation="eager")
        network = petra.as_network(petra.make_reversible(module)), petra.as_network(module)
        right_padded = (IDS * KEEP, KEEP) if name != "MistralForCausalLM" else (IDS,)  # NaN in transformers
        check_outputs(module, network[1], right_padded)
        assert not network[0](IDS * KEEP, KEEP).isnan().any()

    def test_inputs_of_the_wrong_kind(self):
        network = petra.as_network(transformer("LlamaForCausalLM"))
        with pytest.raises(ValueError, match=r"takes input_ids, or \(input_ids, attention_mask\), as input: not float"):
            network(IMAGES)
        with pytest.raises(ValueError, match=r"the attention mask has shape \(3, 1, 9, 9\), but the tokens have"):
            network(IDS, torch.ones(3, 1, 9, 9))

    def test_unknown_heads_and_masks(self):
        module = transformer("LlamaForCausalLM")
        module.config._attn_implementation = "flex_attention"
        with pytest.raises(ValueError, match="uses attn_implementation='flex_attention', whose masks are not known"):
            petra.as_network(module)
        transformers = library("transformers")
        config = transformers.BertConfig(**TRANSFORMERS["BertModel"][1])
        with pytest.raises(ValueError, match="the head of BertForQuestionAnswering is not known: the known heads are"):
            petra.as_network(transformers.BertForQuestionAnswering(config))


class TestTimm:
    @pytest.mark.parametrize("converted", [False, True])
    @pytest.mark.parametrize("name", TIMM)
    def test_outputs(self, name, converted):
        module = timm_network(name)
        module = petra.make_reversible(module) if converted else module
        network = petra.as_network(module)
        blocks = sum(len(segment.names) for segment in petra.conversion_report(module).segments)
        assert sum(isinstance(layer, petra.ReversibleLayer) for layer in network) == blocks
        assert len(network) >= 6
        check_outputs(module, network, (IMAGES,), 0)


class TestTorchvision:
    @pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
    def test_outputs(self, name):
        models = library("torchvision.models")
        module = getattr(models, name)(num_classes=5).double()
        network = petra.as_network(module, IMAGES)
        assert len(network) > 10
        check_outputs(module, network, (IMAGES,), 0)

    def test_resnets_end_with_a_relu(self):
        models = library("torchvision.models")
        with pytest.raises(ValueError, match=r"ResNet has no blocks .* apply a ReLU to the sum, which cannot be"):
            petra.make_reversible(models.resnet18(num_classes=5))

    def test_convnext(self):
        models = library("torchvision.models")
        settings = [models.convnext.CNBlockConfig(8, 16, 3), models.convnext.CNBlockConfig(16, None, 2)]
        module = petra.make_reversible(models.ConvNeXt(settings, 0.1, num_classes=5).double())
        assert [len(segment.names) for segment in petra.conversion_report(module).segments] == [3, 2]
        check_outputs(module, petra.as_network(module), (IMAGES,), 0)


def logits_loss(outputs, targets):
    outputs = outputs.logits if hasattr(outputs, "logits") else outputs
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


GENERATOR = torch.Generator().manual_seed(2)
TEXTS = [torch.randint(5, 40, (3, 9), generator=GENERATOR) for _ in range(5)]
LABELS = [torch.randint(5, (3,), generator=GENERATOR) for _ in range(5)]
TRAINED = {
    "GPT2LMHeadModel": [((x,), x) for x in TEXTS],
    "LlamaForCausalLM": [((x * KEEP, KEEP), x) for x in TEXTS],
    "BertForSequenceClassification": [((x, KEEP), y) for x, y in zip(TEXTS, LABELS, strict=True)],
    "DistilBertForSequenceClassification": [((x,), y % 2) for x, y in zip(TEXTS, LABELS, strict=True)],
    "vit_tiny_patch16_224": [((IMAGES * (1 + i),), torch.tensor([i % 5, 1])) for i in range(5)],
    "resnetv2_18": [((IMAGES * (1 + i),), torch.tensor([i % 5, 1])) for i in range(5)],
}


def converted(name):
    module = timm_network(name, drop_path_rate=0.0) if name in TIMM else without_dropout(transformer(name))
    module = petra.make_reversible(module)
    if name == "GPT2LMHeadModel":
        petra.as_network(module, untie=True)
    return module.train()


class TestTraining:
    @pytest.mark.parametrize("name", TRAINED)
    def test_equals_a_loop_with_backward(self, name):
        module = converted(name)
        start, plain = copy.deepcopy(module), copy.deepcopy(module)
        optimizer = sgd(plain.parameters())
        for x, y in TRAINED[name]:
            optimizer.zero_grad()
            keywords = {} if x[0].is_floating_point() else dict(zip(("input_ids", "attention_mask"), x, strict=False))
            logits_loss(plain(**keywords) if keywords else plain(*x), y).backward()
            optimizer.step()
        trainer = petra.Trainer(module, method="reversible", stages=4, loss=logits_loss, optimizer=sgd)
        for x, y in TRAINED[name]:
            trainer.step(x, y)
        weights = trainer.weights()
        assert list(weights) == list(start.state_dict())
        for key, expected in plain.state_dict().items():
            torch.testing.assert_close(weights[key], expected, rtol=1e-10, atol=1e-10)
            assert torch.equal(module.state_dict()[key], weights[key])  # trained in place
        assert any(not torch.equal(weights[key], value) for key, value in start.state_dict().items())

    @pytest.mark.parametrize("method", ["petra", "delayed", "features-replay", "backprop"])
    def test_methods_and_checkpoints(self, method):
        def trainer():
            return petra.Trainer(
                converted("LlamaForCausalLM"), method=method, stages=4, loss=logits_loss, optimizer=sgd, seed=1
            )

        data, first = TRAINED["LlamaForCausalLM"], trainer()
        losses = [float(r.loss) for x, y in data * 6 for r in first.step(x, y)]
        assert losses[-1] < 0.9 * losses[0]
        second, third = trainer(), trainer()
        for x, y in data:
            second.step(x, y)
        third.load_state_dict(copy.deepcopy(second.state_dict()))
        for one in (second, third):
            for x, y in data:
                one.step(x, y)
            one.drain()
        assert all(torch.equal(a, b) for a, b in zip(second.weights().values(), third.weights().values(), strict=True))

    @pytest.mark.parametrize("name", ["LlamaForCausalLM", "vit_tiny_patch16_224", "BertForSequenceClassification"])
    def test_two_ranks_equal_one_process(self, name):
        def train(transport=None):
            trainer = petra.Trainer(
                converted(name), method="petra", stages=4, loss=logits_loss, optimizer=sgd, transport=transport
            )
            for x, y in TRAINED[name]:
                trainer.step(x, y)
            trainer.drain()
            return trainer.weights(), trainer.predict(TRAINED[name][0][0])

        alone, outputs = train()
        others = run_together(train, ranks=2)
        assert others[0] == (None, None)
        assert list(alone) == list(others[1][0])
        assert all(torch.equal(a, b) for a, b in zip(alone.values(), others[1][0].values(), strict=True))
        assert torch.equal(outputs, others[1][1])

    def test_pretrained_files(self, tmp_path):
        transformers = library("transformers")
        module = converted("LlamaForCausalLM")
        trainer = petra.Trainer(module, method="petra", stages=3, loss=logits_loss, optimizer=sgd)
        for x, y in TRAINED["LlamaForCausalLM"]:
            trainer.step(x, y)
        trainer.drain()
        module.save_pretrained(tmp_path, state_dict=trainer.weights())
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


class TestTiedWeights:
    def test_two_stages_cannot_share_them(self):
        module = petra.make_reversible(without_dropout(transformer("GPT2LMHeadModel")))
        with pytest.raises(ValueError, match=r"transformer.wte.weight and lm_head.weight of GPT2LMHeadModel share one"):
            petra.Trainer(module, stages=2, loss=logits_loss, optimizer=sgd)
        trainer = petra.Trainer(module, stages=1, loss=logits_loss, optimizer=sgd)
        for x, y in TRAINED["GPT2LMHeadModel"]:
            trainer.step(x, y)
        assert module.lm_head.weight is module.transformer.wte.weight

    def test_untied(self):
        module = transformer("GPT2LMHeadModel").eval()
        before = module(input_ids=IDS).logits
        network = petra.as_network(module, untie=True)
        assert module.lm_head.weight is not module.transformer.wte.weight
        assert not module.config.tie_word_embeddings
        assert torch.equal(module(input_ids=IDS).logits, before)
        petra.Trainer(network, stages=5, loss=logits_loss, optimizer=sgd)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def start(self, x):
        return self.embed(x) * self.scale

    def finish(self, x):
        return self.head(x.mean(1))

    def forward(self, x):
        x = self.start(x)
        if float(x.detach().sum()) > 1e9:  # tracing fails here
            return x
        for block in self.blocks:
            x = x + block(x)
        return self.finish(x)


class Residual(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return x + self.block(x)


class Told(Encoder):
    def stages(self):
        return [(self.start, self.embed, self.scale), *map(Residual, self.blocks), (self.finish, self.head)]


class TestStages:
    def test_a_module_that_tells_its_layers(self):
        module, x = Told(), torch.randn(2, 5, 4)
        network = petra.as_network(module, x)
        assert len(network) == 5
        assert torch.equal(network(x), module(x))
        assert list(network.state_dict()) == list(module.state_dict())
        trainer = petra.Trainer(module, method="delayed", stages=5, loss=cross_entropy, optimizer=sgd)
        before = copy.deepcopy(module.state_dict())
        for _ in range(12):
            trainer.step(x, torch.tensor([0, 2]))
        trainer.drain()
        assert not any(torch.equal(before[name], value) for name, value in module.state_dict().items())

    def test_a_part_that_was_not_named(self):
        class Forgetful(Encoder):
            def stages(self):
                return [(self.start, self.embed), *self.blocks, self.finish]

        with pytest.raises(ValueError, match=r"start of Forgetful fails .*'scale'.*: name every submodule, parameter"):
            petra.as_network(Forgetful())(torch.randn(2, 5, 4))

    @pytest.mark.parametrize(
        ("stages", "message"),
        [
            (lambda self: 3, r"stages\(\) of Encoder returns int: return a list of layers"),
            (lambda self: [3], r"item 0 of stages\(\) of Encoder is a int: give a module"),
            (lambda self: [(self.start, nn.Linear(2, 2))], "item 0 .* uses a Linear that Encoder has not registered"),
        ],
    )
    def test_mistakes(self, stages, message):
        module = Encoder()
        Encoder.stages = stages
        try:
            with pytest.raises(ValueError, match=message):
                petra.as_network(module)
        finally:
            del Encoder.stages

    def test_layers_that_compute_something_else(self):
        class Wrong(Told):
            def stages(self):
                first, _, *others = super().stages()
                return [first, *others]

        with pytest.raises(ValueError, match="the layers of Wrong compute something else than its forward"):
            petra.as_network(Wrong(), torch.randn(2, 5, 4))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cat([x, self.up(self.middle(self.down(x)).relu())], -1)


class TestTracing:
    def test_a_sequential_with_its_own_forward(self):
        class Doubled(nn.Sequential):
            def forward(self, x):
                return 2 * super().forward(x)

        module, x = Doubled(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
        network = petra.as_network(module, x)
        assert len(network) == 2
        assert torch.equal(network(x), module(x))

    def test_no_place_to_cut(self):
        with pytest.raises(ValueError, match=r"UNet is not a chain: the input is used by .*cat.*no place to cut: give"):
            petra.as_network(UNet())

    def test_control_flow(self):
        with pytest.raises(ValueError, match=r"the forward of Encoder cannot be traced .*: give Encoder a method"):
            petra.as_network(Encoder())

    def test_dependence_on_the_mode(self):
        class Dropped(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return self.two(nn.functional.dropout(self.one(x), 0.5, self.training))

        module = Dropped().eval()
        with pytest.raises(ValueError, match=r"the forward of Dropped depends on self.training at dropout"):
            petra.as_network(module)
        assert not module.training
        assert not module.one.training

    def test_hooks(self):
        module = UNet()
        module.register_forward_hook(lambda module, inputs, outputs: outputs)
        with pytest.raises(ValueError, match="UNet has hooks, which a trainer would not call"):
            petra.as_network(module)

    def test_modes_reach_the_module(self):
        network = petra.as_network(timm_network("vit_tiny_patch16_224"))
        network.eval()
        assert not network.module.blocks[0].norm1.training
        assert not any(layer.training for layer in network)

    def test_no_modules(self):
        with pytest.raises(ValueError, match=r"network is a function: give an nn.Module"):
            petra.as_network(lambda x: x)
