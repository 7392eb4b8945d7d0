"""python -m zero_mini.course.judge FILE [--stages 0 1] [--json FILE]. Status: 0 all points, 1 fewer, 2 not judged."""

import argparse
import sys
from pathlib import Path

from zero_mini.course.judge import judge
from zero_mini.trainer.report import check_file


def main() -> int:
    what = "Grade a my_zero.py (docs/my_zero.md)."
    parser = argparse.ArgumentParser("python -m zero_mini.course.judge", description=what)
    parser.add_argument("file")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), help="default: those that the file has")
    parser.add_argument("--json", help="write the report here, too")
    options = parser.parse_args()
    if options.json:
        try:
            check_file("--json", options.json)
        except ValueError as error:
            parser.error(str(error))
    try:
        report = judge(options.file, options.stages)
    except FileNotFoundError:
        remedy = "lesson 01 writes my_zero.py beside its notebook; give its path"
        print(f"{options.file}: No such file; {remedy}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{options.file}: {error.strerror}; give a my_zero.py", file=sys.stderr)
        return 2
    except (SyntaxError, ValueError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 2
    if options.json:
        Path(options.json).write_text(report.to_json())
    return 0 if report.is_full else 1


if __name__ == "__main__":
    sys.exit(main())
