"""python -m zero_mini.simulate --model 7.5B --stage 3 --world 64: one step as rank 0 of 64, the others absent."""

import argparse
import json
import sys
from pathlib import Path

import torch

from zero_mini.simulate.measure import report
from zero_mini.simulate.setup import DTYPES, SHAPES, SPLIT_ABOVE, Setup, memory_bytes, shape
from zero_mini.trainer.launch import first_line
from zero_mini.trainer.options import unrecognized
from zero_mini.trainer.report import check_file
from zero_mini.trainer.screen import fill, safe_streams


def parse(argv: list[str]) -> tuple[Setup, argparse.Namespace]:
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise ValueError(message)

    parser = Parser("python -m zero_mini.simulate", description=__doc__, allow_abbrev=False)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--model", default="nano", help=f"a shape: {', '.join(SHAPES)}")
    for names in (["--L"], ["--d", "--width"], ["--heads"]):
        parser.add_argument(*names, **number, help="in place of the shape's")
    parser.add_argument("--sequence-length", **number, help="T, in place of the shape's")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--world", **number, default=64, help="ranks (default: 64)")
    parser.add_argument("--rank", **number, default=0, help="which of them this is (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--batch", **number, default=1, help="sequences of this rank")
    parser.add_argument("--steps", **number, default=2, help="1 or 2; only the first is true")
    parser.add_argument("--split", **number, default=SPLIT_ABOVE, help="cut blocks of more elements; 0: cut none")
    parser.add_argument("--keep-activations", action="store_true", help="do not compute blocks again in backward")
    parser.add_argument("--own-slice", action="store_true", help="the trap: absent ranks send this rank's slice")
    parser.add_argument("--memory", type=float, metavar="GB", help="of a smaller GPU (1e9 bytes)")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    chosen, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(unrecognized(unknown, [f"--{name.replace('_', '-')}" for name in vars(chosen)]))
    if chosen.steps not in (1, 2) or chosen.batch < 1 or chosen.split < 0:
        got = f"{chosen.steps}, {chosen.batch} and {chosen.split}"
        raise ValueError(f"--steps must be 1 or 2, --batch at least 1, --split at least 0 (got {got})")
    device = chosen.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Setup(
        shape(chosen.model, L=chosen.L, d=chosen.d, heads=chosen.heads, T=chosen.sequence_length),
        **{name: getattr(chosen, name) for name in ("stage", "rank", "precision", "batch", "own_slice")},
        world_size=chosen.world,
        device=device,
        checkpoint=not chosen.keep_activations,
        split=chosen.split or None,
        device_bytes=memory_bytes(chosen.memory, device),
    ), chosen


def machine(device: str) -> dict[str, object]:
    """What the numbers depend on."""
    if device == "cpu":
        return {"card": "CPU", "cards": 0, "torch": torch.__version__}
    return {
        "card": torch.cuda.get_device_name(0),
        "cards": 1,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0; 1 for an out-of-memory; 2 with one line on stderr for what cannot be."""
    with safe_streams():
        return run(sys.argv[1:] if argv is None else argv)


def run(argv: list[str]) -> int:
    try:
        setup, chosen = parse(argv)
        if chosen.json:
            check_file("--json", chosen.json)
        about, result = setup.run(chosen.steps)
    except (ValueError, OSError) as error:
        print(f"simulate: error: {first_line(error)}", file=sys.stderr)
        return 2
    print(fill(report(about, result)))
    if chosen.json:
        record = {"machine": machine(setup.device), "simulated": [about | result]}
        Path(chosen.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0 if result["outcome"] == "ran" else 1


if __name__ == "__main__":
    sys.exit(main())
