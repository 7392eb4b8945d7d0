"""Run lessons in place and leave in them what is committed: outputs, small pictures, nothing of this machine.

    python notebooks/execute.py notebooks/03_zero2.ipynb       (`make lessons` for all of them)

Left out: checking. `pytest --nbval notebooks` runs them once more and compares.
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLOURS = 256  # of a picture: ours have fewer, all but those of the letters' edges; a file of a third of the size


def execute(path: Path) -> None:
    """Run all cells in order; the first error ends it, and the file stays as it was."""
    lesson = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(lesson, timeout=120, record_timing=False, resources=place).execute()
    lesson.metadata.pop("widgets", None)
    lesson.metadata["language_info"] = {"name": "python"}
    for cell in lesson.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "application/vnd.jupyter.widget-view+json" in data:
                output["data"] = {}  # its state is not kept, and GitHub shows no sliders
            elif "image/png" in data:
                data["image/png"] = small(data["image/png"])
        cell.get("outputs", [])[:] = [output for output in cell.get("outputs", []) if output.get("data") != {}]
    nbformat.write(lesson, path)


def small(png_base64: str) -> str:
    """The picture in few colours."""
    picture = Image.open(io.BytesIO(base64.b64decode(png_base64))).convert("RGB").quantize(COLOURS)
    saved = io.BytesIO()
    picture.save(saved, "PNG", optimize=True)
    return base64.b64encode(saved.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
        print(name)
