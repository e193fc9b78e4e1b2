"""WHICH samples does a rank see?  The same inside a model replica, different between replicas.

Lightning keys samplers, worker seeds and users' own samplers on the global rank. Here they must follow the
data-parallel coordinate: all ranks of a replica work on the same batch.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError


def fit_loader_to_replicas(
    loader: Any, replica: int, num_replicas: int, world_size: int, seed_worker: Callable[..., None]
) -> Any:
    """Make a user's loader follow the data-parallel coordinate. Changes it in place, returns it.

    Args:
        loader: What Lightning prepared; anything that is not a DataLoader is left alone.
        replica: This rank's data-parallel coordinate.
        num_replicas: Data-parallel size.
        world_size: Number of processes.
        seed_worker: Lightning's worker_init_fn, which takes the rank as keyword.
    """
    if not isinstance(loader, DataLoader):
        return loader
    # under the condition on which Lightning would add it, but with the replica in place of the global rank
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(seed_worker, rank=replica)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        # a sampler the user built from the global rank deals every rank of a replica other samples
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas == world_size != num_replicas:
            _deal_to_replicas(sampler, replica, num_replicas)
    return loader


def _deal_to_replicas(sampler: Any, replica: int, num_replicas: int) -> None:
    fresh: Any = DistributedSampler(
        sampler.dataset, num_replicas, replica, sampler.shuffle, sampler.seed, sampler.drop_last
    )
    for attribute in ("num_replicas", "rank", "num_samples", "total_size"):
        setattr(sampler, attribute, getattr(fresh, attribute))


class NoBatches:
    """Stands for an evaluation loader without batches, so that its rank still takes part in the evaluation.

    Lightning leaves out an evaluation whose loaders have length zero; the hooks and means of the other replicas would
    wait.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def stand_in_for_empty(loader: Any, replicas: Communicator) -> Any:
    """`loader`, or where only this replica has no batch of it, what stands for it.

    Collectives: an all-gather of one number over `replicas`, the data-parallel axis on the CPU.
    """
    lengths = replicas.all_gather_object(sized_len(loader))
    mine = lengths[replicas.rank]
    return NoBatches(loader) if mine == 0 and any(lengths) else loader


def check_equal_batches(mine: float, steps_left: float, replicas: Communicator) -> None:
    """Replicas that train take the same number of batches of every epoch.

    Args:
        mine: Batches of this replica in an epoch.
        steps_left: Batches until the training ends anyway.
        replicas: The data-parallel axis on the CPU.

    Collectives: an all-gather of one number over `replicas`.

    Raises:
        ConfigurationError: One would wait for another; raised on all.
    """
    numbers = replicas.all_gather_object(mine)
    if len(set(numbers)) > 1 and min(numbers) < steps_left:
        raise ConfigurationError(
            f"the data-parallel replicas have {', '.join(f'{n:g}' for n in numbers)} training batches in an epoch. "
            "They reduce gradients together after each, so the one with more would wait for ever. Give all the same "
            "number: a DistributedSampler (or drop_last=True) in a loader that divides data itself, or "
            f"Trainer(limit_train_batches={min(numbers):g})."
        )


def check_equal_evaluation(mine: Sequence[float], replicas: Communicator) -> None:
    """Replicas that gather parameters together (ZeRO-3) evaluate the same number of batches.

    Args:
        mine: Batches of this replica, per loader.
        replicas: The data-parallel axis on the CPU.

    Collectives: an all-gather of a few numbers over `replicas`.

    Raises:
        ConfigurationError: One would wait for another; raised on all.
    """
    numbers = replicas.all_gather_object(tuple(mine))
    if len(set(numbers)) > 1:
        listed = ", ".join(" + ".join(f"{n:g}" for n in each) or "no" for each in numbers)
        raise ConfigurationError(
            f"the data-parallel replicas have {listed} batches to evaluate. With zero_stage=3 they gather parameters "
            "together for each, so the one with more would wait for ever. Give all the same number (a "
            "DistributedSampler does, or a limit in the Trainer), or use zero_stage=2."
        )


@contextmanager
def random_state_kept(collect: Callable[[], Any], restore: Callable[[Any], None]) -> Iterator[None]:
    """Put every global random generator back to where it was."""
    state = collect()
    try:
        yield
    finally:
        restore(state)


def first_batch(loaders: Any) -> Any:
    """The first batch of a loader, or of every loader in a list, dict or CombinedLoader, in that structure.

    A map-style loader's samples are read in this process, without starting its workers. The caller keeps the random
    state; an iterable dataset is iterated once more than it would be.

    Args:
        loaders: What the user's `*_dataloader` hook returned.

    Raises:
        ConfigurationError: A loader is empty.
    """
    if type(loaders).__name__ == "CombinedLoader":
        loaders = loaders.iterables
    return tree_map(_first, loaders, is_leaf=lambda x: not isinstance(x, (list, tuple, dict)))


def _first(loader: Any) -> Any:
    try:
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            dataset: Any = loader.dataset
            if loader.batch_sampler is None:
                sample = dataset[next(iter(loader.sampler))]
                return loader.collate_fn(sample)
            indices = next(iter(loader.batch_sampler))
            if hasattr(dataset, "__getitems__"):
                return loader.collate_fn(dataset.__getitems__(indices))
            return loader.collate_fn([dataset[i] for i in indices])
        return next(iter(loader))
    except StopIteration:
        raise ConfigurationError(
            f"a {type(loader).__name__} gives no batch. The plan is made by following the first batch through the "
            "user's step, so every loader needs at least one; check its length, batch_size and drop_last."
        ) from None


def broadcast_batch(batch: Any, world: Communicator) -> Any:
    """The first rank's batch on every rank.

    Collectives: one broadcast of the pickled batch.

    Raises:
        ConfigurationError: It cannot be pickled; raised on every rank.
    """
    message: tuple[str, bytes] = ("", b"")
    if world.rank == 0:
        try:
            message = ("", pickle.dumps(batch))
        except (AttributeError, TypeError, pickle.PicklingError, RuntimeError) as error:
            message = (f"the first batch ({type(batch).__qualname__}) cannot be pickled: {error}", b"")
    problem, content = world.broadcast_object(message, 0)
    if problem:
        raise ConfigurationError(
            f"{problem}. All ranks plan with the same first batch, so rank 0 sends it to the others. Define the "
            "classes of your batches at the top level of a module (not inside a function or method), and keep "
            "generators, locks, open files and lambdas out of batches."
        )
    return batch if world.rank == 0 else pickle.loads(content)


def batch_digest(batch: Any) -> str:
    """A short hash of all tensors (values and shapes) and other leaves of a batch."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            data = leaf.detach().to("cpu").contiguous()
            digest.update(f"{tuple(data.shape)}{data.dtype}".encode())
            if data.numel():
                digest.update(data.view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (str, int, float, bool, bytes, type(None))):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def check_same_batch(batch: Any, replica: Communicator, where: str) -> None:
    """Raise on every rank of the replica unless all of them hold the same batch.

    Collectives: one all-gather of a short string over the replica.

    Raises:
        ConfigurationError: They differ.
    """
    digests = replica.all_gather_object(batch_digest(batch))
    if len(set(digests)) > 1:
        raise ConfigurationError(
            f"{where}: the {replica.size} ranks of one model replica got different batches (digests "
            f"{', '.join(d[:8] for d in digests)}). They work on one model together, so they must read the same "
            "samples; only the data-parallel replicas read different ones. Likely the dataset or sampler looks at the "
            "global rank, or draws from an unseeded generator. Use trainer.distributed_sampler_kwargs "
            "(num_replicas, rank) instead of the world size and global rank, and call seed_everything(...) before the "
            "dataset is made."
        )
