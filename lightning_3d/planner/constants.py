"""HOW MUCH of its peaks does a GPU reach, and what does the software do?  The only fitted numbers (no torch here).

`GENERATIONS` has one set per GPU generation; `SOFTWARE` says how a framework works (what it overlaps, what it fuses).
Both were fitted on the published rows that `benchmarks/planner_scores.py` reads; nothing is fitted per row or model.
Where a number comes from and how well it does: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.errors import ConfigurationError, near


@dataclass(frozen=True)
class Generation:
    """What a generation of GPUs reaches.

    Attributes:
        processors: Streaming multiprocessors: tiles of a matrix product that run at once.
        matmul, matmul_fp8, matmul_rowwise, matmul_fp4: Share of the peak of the best matrix product: in bf16, fp8
            scaled by tensors or blocks, fp8 scaled by rows, fp4.
        memory: Share of the memory bandwidth of elementwise operations.
        flash, flash_backward: Share of the bf16 peak of fused attention.
        scores: Share of the peak of the two products of attention if the scores are written to memory.
        link: Share of the link's bandwidth of large collectives in a machine.
        in_switch: The same of an all-reduce over more than 4 GPUs if the switch sums (NVLink SHARP: the operand goes to
            it once and comes back once); 0: it does not.
        latency: Seconds of the smallest collective in a machine.
        ramp, ramp_bytes: Seconds that collectives of middle size (around `ramp_bytes`) lose besides.
        network: Share of the network's bandwidth of large collectives between machines.
        network_latency: Seconds of the smallest collective between machines, per doubling of their number.
    """

    processors: int
    matmul: float
    matmul_fp8: float
    matmul_rowwise: float
    matmul_fp4: float
    memory: float
    flash: float
    flash_backward: float
    scores: float
    link: float
    in_switch: float
    latency: float
    ramp: float
    ramp_bytes: float
    network: float
    network_latency: float


GENERATIONS: dict[str, Generation] = {
    "volta": Generation(
        80, 0.90, 0.0, 0.0, 0.0, 0.88, 0.40, 0.34, 0.40, 0.80, 0.0, 45e-6, 200e-6, 30e6, 0.70, 40e-6
    ),
    "ampere": Generation(
        108, 0.86, 0.0, 0.0, 0.0, 0.88, 0.70, 0.59, 0.53, 0.785, 0.0, 45e-6, 200e-6, 30e6, 0.64, 30e-6
    ),
    "hopper": Generation(
        132, 0.69, 0.565, 0.23, 0.0, 0.78, 0.455, 0.385, 0.30, 0.81, 0.605, 40e-6, 60e-6, 30e6, 0.70, 30e-6
    ),
    "hopper_500w": Generation(
        132, 0.61, 0.525, 0.20, 0.0, 0.78, 0.41, 0.345, 0.30, 0.81, 0.605, 40e-6, 60e-6, 30e6, 0.70, 30e-6
    ),
    "blackwell": Generation(
        148, 0.74, 0.56, 0.23, 0.41, 0.80, 0.37, 0.31, 0.30, 0.757, 0.53, 50e-6, 120e-6, 30e6, 0.955, 165e-6
    ),
    "blackwell_ultra": Generation(
        148, 0.74, 0.69, 0.28, 0.385, 0.80, 0.54, 0.45, 0.30, 0.757, 0.53, 50e-6, 120e-6, 30e6, 0.955, 165e-6
    ),
    "cdna3": Generation(
        304, 0.50, 0.40, 0.20, 0.0, 0.70, 0.30, 0.25, 0.25, 0.70, 0.0, 50e-6, 200e-6, 30e6, 0.70, 40e-6
    ),
    "ada": Generation(
        142, 0.85, 0.70, 0.30, 0.0, 0.85, 0.60, 0.50, 0.40, 0.70, 0.0, 30e-6, 200e-6, 30e6, 0.70, 40e-6
    ),
    # gloo on one machine, processes that share its cores
    "cpu": Generation(
        1, 0.86, 0.0, 0.0, 0.0, 0.88, 0.30, 0.25, 0.30, 0.80, 0.0, 2e-3, 0.0, 30e6, 0.80, 2e-3
    ),
}  # fmt: skip


UPDATE_SPEED = 0.7
"""Share of the memory bandwidth that the optimizer's update reaches: many small tensors, and not one kernel for all."""
STRAGGLERS = 0.006
"""Share of a step that is lost with every doubling of the machines: everybody waits for the slowest. MosaicML's series
from 8 to 512 GPUs lose 1 to 1.5 % per doubling beyond what communication explains, NeMo's and Megatron's half of it."""


@dataclass(frozen=True)
class Software:
    """How a framework runs a step.

    Attributes:
        flash: Whether attention is fused, or its scores are written to memory.
        attention: Speed of its fused attention, relative to the best of its time.
        ring: Share of that speed which is left where a sequence is divided (blocks, and waiting for the last of them).
        elementwise: Bytes that elementwise operations move, relative to fused ones.
        host: Seconds in which the CPU launches one layer, one way; a layer takes at least that.
        sync: Seconds that a layer waits for the CPU each time it runs, whatever its size.
        data_overlap: Share of the gradients' (and in ZeRO-3 the parameters') communication that may run beside
            computation.
        tensor_overlap: Share of tensor-parallel communication that runs beside computation.
        pipeline_overlap: Whether messages of the pipeline run beside computation.
        gather_overlap: The same of gathering updated parameters (ZeRO 1 and 2).
        rings: Network adapters of a machine that one collective uses; 0: all.
        balanced: Whether stages are cut by cost (otherwise into equal numbers of layers where that comes out even).
        data_inside: Whether replicas of a stage are neighbours (Megatron's order of axes), or stages of a replica are.
        scatter: Whether tensor-parallel ranks send a part of a stage's message each.
        gathers_once: Whether ZeRO-3 in a pipeline gathers once for all microbatches.
        shard_host: Seconds, per layer and replica, in which the CPU launches the copies of every parameter's shards,
            where ZeRO 1 and 2 scatter and gather lists of them in place of one buffer.
        reduces_whole: Whether ZeRO 1 reduces whole gradients on every rank, as without ZeRO.
        adds_whole: Whether ZeRO-3 adds up the gradients of several microbatches whole, in the precision in which they
            are reduced, once a step (FSDP2 without gradient synchronisation); otherwise it reduces every microbatch's.
        fused_gate: Whether a gated MLP keeps three activations, or four.
        keeps_gathered: Whether sequence parallelism keeps the gathered inputs of linear layers for the backward.
        logits: Bytes per logit at the peak: in the activations' and in full precision, their gradients, the loss.
        whole_logits: Whether logits are whole on every tensor-parallel rank.
        whole_embedding: Whether every tensor-parallel rank holds the whole embedding; in a pipeline the head, too.
        keeps_products: Whether selective recomputation keeps the results of all products (`recompute.py`), or means
            attention's scores (Korthikanti et al.).
        narrow: Whether fp8 keeps the inputs of linear layers in 8 bits.
        after_inputs: Share of a microbatch's activations that is kept between the two halves of a split backward.
        splits_recomputed: Whether a split backward also splits windows whose blocks are computed again. This library
            does not, since they would be computed again for each half: `I` does all of it, `W` nothing.
        bucket, buckets_in_flight: Bytes of a bucket of gradients, and how many may be reduced at once; 0: the recipe
            says all (`zero/engine.py`: without accumulation no more full-size gradients are kept than are under way).
        buffers: Bytes of communication buffers and workspaces.
        reserve: Share of what is allocated that the allocator holds besides (fragments).
        context: Bytes that the device's context and the communication library hold.
        speed: Share of the kernels' speed that is left in a whole run (synchronisation, stragglers, the input, clocks).
    """

    flash: bool = True
    attention: float = 1.0
    ring: float = 0.9
    elementwise: float = 1.0
    host: float = 100e-6
    sync: float = 0.0
    data_overlap: float = 0.9
    tensor_overlap: float = 0.0
    pipeline_overlap: bool = False
    gather_overlap: float = 0.0
    rings: int = 0
    balanced: bool = False
    data_inside: bool = False
    scatter: bool = False
    gathers_once: bool = False
    shard_host: float = 0.0
    reduces_whole: bool = False
    adds_whole: bool = False
    fused_gate: bool = True
    keeps_gathered: bool = False
    logits: float = 12.0
    whole_logits: bool = False
    whole_embedding: bool = False
    narrow: bool = False
    keeps_products: bool = False
    after_inputs: float = 1.0
    splits_recomputed: bool = True
    bucket: float = 0.0
    buckets_in_flight: int = 0
    buffers: float = 0.3e9
    reserve: float = 0.04
    context: float = 1.5e9
    speed: float = 0.93


_COMPILED = Software(gathers_once=True, logits=14.0, ring=0.6, elementwise=0.8, speed=0.84)
# FSDP2 with DTensor, logits gathered and left in bf16 (KempnerForge)
_DTENSOR = Software(gathers_once=True, adds_whole=True, logits=8.0, whole_logits=True, whole_embedding=True, ring=0.6)

SOFTWARE: dict[str, Software] = {
    # PyTorch modules, eager, scaled_dot_product_attention; gradients reduced while the backward runs
    "lightning_3d": Software(
        keeps_products=True,
        fused_gate=False,
        logits=14.0,
        elementwise=1.7,
        host=250e-6,
        speed=0.85,
        balanced=True,
        gathers_once=True,
        splits_recomputed=False,
        bucket=25 * 2**20,
        buckets_in_flight=3,
    ),
    # the same on CPUs: gloo, smaller buckets
    "lightning_3d-cpu": Software(
        keeps_products=True,
        fused_gate=False,
        logits=14.0,
        elementwise=1.7,
        host=3e-3,
        balanced=True,
        gathers_once=True,
        splits_recomputed=False,
        data_overlap=0.3,
        bucket=4 * 2**20,
        buckets_in_flight=3,
        buffers=0.0,
        context=0.3e9,
    ),
    # fused kernels in C++, scores written to memory, gradients reduced after the backward (2019 to 2022)
    "megatron-2021": Software(
        logits=11.0, after_inputs=0.5, flash=False, data_overlap=0.0, data_inside=True, scatter=True, speed=0.95
    ),
    # Transformer Engine, overlapped gradients and parameters (from 2023 on)
    "megatron": Software(
        logits=11.0,
        buffers=0.11e9,
        narrow=True,
        attention=0.95,
        elementwise=1.1,
        tensor_overlap=0.71,
        pipeline_overlap=True,
        gather_overlap=0.9,
        data_inside=True,
        scatter=True,
        speed=0.95,
    ),
    "deepspeed-2021": Software(flash=False, rings=1, data_inside=True),
    "deepspeed": Software(
        buffers=2e9,
        flash=False,
        data_overlap=0.0,
        data_inside=True,
        scatter=True,  # its engine sends partitioned activations where there is tensor parallelism
        reduces_whole=True,
        sync=2.2e-3,
        speed=0.87,
    ),
    "fsdp": Software(logits=4.0, attention=0.58, host=200e-6, speed=0.88),
    "torchtitan": Software(
        fused_gate=False, gathers_once=True, logits=14.0, ring=0.6, elementwise=1.7, host=200e-6, speed=0.85
    ),
    "torchtitan-compile": _COMPILED,
    "torchtitan-async": replace(_COMPILED, tensor_overlap=0.35),
    # since April 2025 the loss is compiled, too (torchtitan #1033): of logits only bf16 ones and their gradients exist
    "torchtitan-2025": replace(_COMPILED, logits=4.0),
    "torchtitan-2025-async": replace(_COMPILED, logits=4.0, tensor_overlap=0.35),
    "dtensor": replace(_DTENSOR, fused_gate=False, elementwise=1.7, host=200e-6, speed=0.83),
    "dtensor-compile": replace(_DTENSOR, elementwise=0.8, speed=0.89),
    "nanotron": Software(
        fused_gate=False,
        logits=9.0,
        reserve=0.12,
        elementwise=0.95,
        host=300e-6,
        data_overlap=0.5,
        speed=0.95,
        shard_host=48e-6,  # six parameters of a layer, scattered and gathered, 4 us for a launch
    ),
}


def software_named(name: str) -> Software:
    """How a framework works.

    Raises:
        ConfigurationError: It is not known.
    """
    if name not in SOFTWARE:
        raise ConfigurationError(
            f"software {name!r} is not known; known are {', '.join(SOFTWARE)}.{near(name, SOFTWARE)}"
        )
    return SOFTWARE[name]
