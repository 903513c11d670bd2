"""The Trainer of Hugging Face and Accelerate with reversible networks."""

import copy
import warnings
from functools import wraps

import pytest
import torch
from helpers.libraries import library
from torch import nn

import petra
from petra.integrations import NetworkWithLoss

pytestmark = pytest.mark.slow  # the first test imports transformers

TEXT = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def transformers():
    return library("transformers")


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def gpt2(transformers, **settings):
    torch.manual_seed(0)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 3, "n_head": 2}
    config = transformers.GPT2Config(**TEXT, **sizes, loss_type="ForCausalLM", **settings)
    return transformers.GPT2LMHeadModel(config)


def texts(count=16):
    found = torch.randint(3, 20, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": x, "labels": x} for x in found]


def images():
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": x[i], "labels": i % 4} for i in range(16)]


def vit():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch": 4, "depth": 2, "width": 8, "heads": 2, "num_classes": 4, "in_channels": 1}
    return petra.models.create("rev-vit-s", **sizes)


def train(transformers, model, data, folder, resume=None, **settings):
    chosen = {"max_steps": 4, "save_strategy": "no", "gradient_accumulation_steps": 2, **settings}
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", learning_rate=0.01, **chosen,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def close(a, b):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=name)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def with_plain_autograd(model):
    """The same network, with stored activations."""
    forward = model.forward

    @wraps(forward)  # the Trainer reads the signature
    def plain(*args, **kwargs):
        with petra.plain_autograd():
            return forward(*args, **kwargs)

    model.forward = plain
    return model


class TestTrainer:
    def test_converted_gpt2_trains_as_with_stored_activations(self, transformers, tmp_path):
        found, expected = (petra.make_reversible(gpt2(transformers, resid_pdrop=0.0)) for _ in range(2))
        before = copy.deepcopy(found.state_dict())
        train(transformers, found, texts(), tmp_path)
        reference = train(transformers, with_plain_autograd(expected), texts(), tmp_path)
        close(found, expected)
        assert not torch.equal(before["transformer.wte.weight"], found.transformer.wte.weight)
        assert reference.state.global_step == 4

    def test_converted_bert_trains(self, transformers, tmp_path):
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **sizes)
        model = petra.make_reversible(transformers.BertForSequenceClassification(config))
        data = [{"input_ids": text["input_ids"], "labels": i % 2} for i, text in enumerate(texts())]
        trainer = train(transformers, model, data, tmp_path)
        assert {"eval_loss"} <= trainer.evaluate().keys()

    def test_checkpoints_and_pretrained_folders(self, transformers, tmp_path):
        whole, resumed = (petra.make_reversible(gpt2(transformers)) for _ in range(2))
        train(transformers, whole, texts(), tmp_path, save_strategy="steps", save_steps=2)
        train(transformers, resumed, texts(), tmp_path / "again", resume=str(tmp_path / "checkpoint-2"))
        assert equal(whole, resumed)
        whole.save_pretrained(tmp_path / "saved")
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        converted = petra.make_reversible(loaded)
        assert equal(whole, converted)
        x = texts(1)[0]["input_ids"][None]
        with torch.no_grad():
            found, other, original = (n.eval()(x, use_cache=False).logits for n in (converted, loaded, whole))
        assert torch.equal(found, original)
        assert not torch.allclose(other, original)  # without conversion it computes another function

    def test_network_of_petra(self, transformers, tmp_path):
        network, expected = vit(), vit()
        model = NetworkWithLoss(network, nn.functional.cross_entropy)
        plain = {"lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0}  # Adam would hide a factor
        trainer = train(transformers, model, images(), tmp_path, remove_unused_columns=False, **plain)
        assert trainer.predict(images()).predictions.shape == (16, 4)
        assert trainer.evaluate()["eval_loss"] < 2
        optimizer = torch.optim.SGD(expected.parameters(), 0.01)
        again = transformers.Trainer(
            model=NetworkWithLoss(expected, nn.functional.cross_entropy), args=trainer.args, train_dataset=images()
        )
        transformers.set_seed(trainer.args.seed)
        batches = [(b["pixel_values"], b["labels"]) for b in again.get_train_dataloader()]
        for step in range(4):
            for x, y in batches[2 * step : 2 * step + 2]:
                (nn.functional.cross_entropy(expected(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        close(network, expected)

    def test_missing_inputs(self):
        with pytest.raises(ValueError, match="the batch has images, but no pixel_values: name the inputs"):
            NetworkWithLoss(vit(), nn.functional.cross_entropy)(images=torch.zeros(1))


def test_accelerate(tmp_path):
    accelerate = library("accelerate")
    network, expected = vit(), vit()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    data = [(item["pixel_values"], item["labels"]) for item in images()]
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    prepared, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.cross_entropy(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()
    reference = torch.optim.SGD(expected.parameters(), 0.1)
    for i, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        (nn.functional.cross_entropy(expected(x), y) / 2).backward()
        if i % 2:
            reference.step()
            reference.zero_grad()
    assert equal(network, expected)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        next(network.parameters()).zero_()
    accelerator.load_state(tmp_path / "state")
    assert equal(network, expected)
