"""Tensor x pipeline x data parallelism for an unmodified LightningModule."""
