"""Pathfinder: long dashed paths among short ones, as tasks and as a generator."""

from dlrnn.tasks.pathfinder.generator import PathfinderGenerator, lra, path_x, segmentation
from dlrnn.tasks.pathfinder.task import Pathfinder, PathfinderSegmentation, PathX

__all__ = [
    "PathX",
    "Pathfinder",
    "PathfinderGenerator",
    "PathfinderSegmentation",
    "lra",
    "path_x",
    "segmentation",
]
