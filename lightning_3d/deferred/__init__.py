"""WHAT are a model's values before anybody needs them?  Remembered, not kept; see README.md."""

from lightning_3d.deferred.building import building
from lightning_3d.deferred.files import reading_later
from lightning_3d.deferred.realize import is_unwritten, leave_empty, realize, realize_all, realize_all_but_parameters
from lightning_3d.deferred.records import agree_on_records
from lightning_3d.deferred.tensor import Deferred, is_deferred

__all__ = [
    "Deferred",
    "agree_on_records",
    "building",
    "is_deferred",
    "is_unwritten",
    "leave_empty",
    "reading_later",
    "realize",
    "realize_all",
    "realize_all_but_parameters",
]
