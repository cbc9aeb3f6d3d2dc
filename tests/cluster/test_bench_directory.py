"""`halfmoon bench directory` at a small size: it finds every block, and prints every figure."""

from __future__ import annotations

import argparse

from cluster import bench_directory


def test_every_figure_is_there():
    parser = argparse.ArgumentParser()
    bench_directory.add_arguments(parser)
    report = bench_directory.run(
        parser.parse_args(
            ["--blocks", "4000", "--nodes", "3", "--updates", "3000", "--rounds", "3"]
        )
    )
    names = {figure.name for figure in report.figures}
    assert {
        "memory per block and holder",
        "updates applied",
        "match of 512 blocks, p50",
        "match and lease of 512 blocks, p50",
        "loss of a node",
    } <= names
    assert len(names) == len(report.figures) == 10
