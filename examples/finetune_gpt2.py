"""GPT-2 of Hugging Face, made reversible and fine-tuned with the Trainer of Hugging Face.

python examples/finetune_gpt2.py                              # a small GPT-2 with random weights reads bytes
python examples/finetune_gpt2.py --pretrained gpt2 --text my.txt --out gpt2-mine
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import petra


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", help="a name or folder of Hugging Face, such as gpt2")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.pretrained:
        length, model = 512, GPT2LMHeadModel.from_pretrained(options.pretrained)
        tokens = AutoTokenizer.from_pretrained(options.pretrained)(options.text.read_text())["input_ids"]
    else:
        sizes = {"n_embd": 16 if options.smoke else 64, "n_layer": 2 if options.smoke else 4, "n_head": 2}
        config = GPT2Config(vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0, **sizes)
        length, model, tokens = 64, GPT2LMHeadModel(config), list(options.text.read_bytes())
    texts = [torch.tensor(tokens[i : i + length]) for i in range(0, len(tokens) - length, length // 4)]

    model = petra.make_reversible(model)  # stores no activations between its blocks; fine-tuning adapts the weights
    print(petra.conversion_report(model))
    settings = TrainingArguments(
        output_dir=str(options.out / "checkpoints"),
        max_steps=5 if options.smoke else options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-5 if options.pretrained else 3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
    )  # leave gradient_checkpointing off: a reversible network does not need it
    trainer = Trainer(model, settings, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
    result = trainer.train()
    model.save_pretrained(options.out)  # GPT2LMHeadModel.from_pretrained reads it: then call make_reversible again
    print(f"loss {result.training_loss:.3f}, saved in {options.out}")
    return float(result.training_loss)


if __name__ == "__main__":
    main()
