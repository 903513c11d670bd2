"""Arguments of the command line for a small network and a short training."""

SMALL = [
    *("--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "digits", "--stages", "4"),
    *(
        "--batch-size",
        "64",
        "--epochs",
        "2",
        "--lr",
        "0.05",
        "--warmup-epochs",
        "1",
        "--threads",
        "1",
        "--device",
        "cpu",
    ),
]
