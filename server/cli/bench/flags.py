"""Flags that the benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_result_flags(parser: argparse.ArgumentParser, usual_label: str) -> None:
    """Add `--label`, `--json` and `--commit`."""
    parser.add_argument("--label", help=f"the model's name in the result; default: {usual_label}")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="file for the result, or folder for a file with the default name",
    )
    parser.add_argument(
        "--commit", help="commit of the code, for the result; default: that of the git checkout"
    )
