"""WHICH file holds what?  Checkpoints any layout can read: save, load, inspect, export."""

from lightning_3d.checkpoint.boxes import GlobalTensor, boxes_of, flat_boxes
from lightning_3d.checkpoint.export import export_checkpoint, inspect_checkpoint
from lightning_3d.checkpoint.load import (
    PATH_KEY,
    is_directory_checkpoint,
    load_masters,
    load_model_directory,
    load_model_file,
    load_optimizer_directory,
    load_optimizer_file,
    read_model,
    read_rest,
)
from lightning_3d.checkpoint.save import optimizer_entry, save_directory, whole_checkpoint
from lightning_3d.checkpoint.state import ParameterRecord, RunState

__all__ = [
    "PATH_KEY",
    "GlobalTensor",
    "ParameterRecord",
    "RunState",
    "boxes_of",
    "export_checkpoint",
    "flat_boxes",
    "inspect_checkpoint",
    "is_directory_checkpoint",
    "load_masters",
    "load_model_directory",
    "load_model_file",
    "load_optimizer_directory",
    "load_optimizer_file",
    "optimizer_entry",
    "read_model",
    "read_rest",
    "save_directory",
    "whole_checkpoint",
]
