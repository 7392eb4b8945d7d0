"""python -m zero_mini.course.judge FILE [--stages 0 1] [--json report.json]. Status 0 for all points, else 1."""

import argparse
import sys
from pathlib import Path

from zero_mini.course.judge import judge


def main() -> int:
    parser = argparse.ArgumentParser("zero_mini.course.judge", description="Grade a my_zero.py (docs/my_zero.md).")
    parser.add_argument("file")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), help="default: those that the file has")
    parser.add_argument("--json", help="write the report here, too")
    options = parser.parse_args()
    try:
        report = judge(options.file, options.stages)
    except FileNotFoundError:
        print(f"{options.file}: No such file; lesson 01 writes my_zero.py beside its notebook", file=sys.stderr)
        return 2
    except (OSError, SyntaxError, ValueError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 2
    if options.json:
        Path(options.json).write_text(report.to_json())
    return 0 if report.is_full else 1


if __name__ == "__main__":
    sys.exit(main())
