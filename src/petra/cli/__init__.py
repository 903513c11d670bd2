"""The command line, `petra COMMAND`.

Start with `main.py` and `parser.py`, which imports the module of a command when it is chosen. Every command has a
module with `add_to`, which describes it, and `run`; `lists.py` has four short ones. `options.py` derives options from
dataclass fields, and `reference.py` renders all of them as a page. `device.py` sets up the device. `petra plan` is in
`plan.py`, `plan_config.py` and `plan_benchmark.py`.
"""
