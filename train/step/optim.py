"""The optimiser, with weight decay on the same parameters as open_clip, and the learning-rate schedules."""

import math
from collections.abc import Iterable, Mapping

from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from dyad.data.base.errors import ConfigError
from dyad.train.config import OptimConfig, Schedule
from dyad.train.step.timm_optim import optimizer_of_timm

FUSED = {"cpu", "cuda"}  # devices for which torch has AdamW as one kernel


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig, scales: Mapping[str, float] | None = None
) -> Optimizer:
    """Build the optimiser optim.name over the parameters that require gradients.

    named_parameters: (name, parameter) pairs. config: learning rate, betas and weight decay. scales: name → factor of
    the learning rate, 1 for all other parameters. Each factor has groups of its own, with the entry "lr_scale". No
    weight decay for parameters with fewer than two dimensions, or with bn, ln, bias or logit_scale in their name, as in
    open_clip_train 3.3. Raises ConfigError if no parameter requires gradients, or for an optimiser or options that
    timm does not have.
    """
    trained = {id(p): (name, p) for name, p in named_parameters if p.requires_grad}.values()
    if not trained:
        raise ConfigError("nothing trains: both towers are frozen and the temperature does not learn")
    parameters: dict[tuple[bool, float], list[Parameter]] = {}
    for name, p in trained:
        parameters.setdefault((not decays(name, p), (scales or {}).get(name, 1.0)), []).append(p)
    groups = [
        {"params": params, "weight_decay": 0.0 if is_plain else config.weight_decay, "lr_scale": scale}
        for (is_plain, scale), params in sorted(parameters.items(), key=lambda item: item[0])
    ]
    if config.name != "adamw":
        return optimizer_of_timm(groups, config)
    fused = all(p.device.type in FUSED for _, p in trained)
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def decays(name: str, parameter: Parameter) -> bool:
    """Whether the optimiser applies weight decay to a parameter.

    Not if it has fewer than two dimensions, or bn, ln, bias or logit_scale in its name.
    """
    return parameter.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def warmup_steps(total_steps: int, config: OptimConfig) -> int:
    """Return the warm-up of a run of `total_steps` in steps; a share is rounded up, as in transformers."""
    return config.warmup if isinstance(config.warmup, int) else math.ceil(config.warmup * total_steps)


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Compute the learning rate of optimiser step `step` (from 0): linear warm-up, then config.schedule.

    total_steps: the number of optimiser steps of the run, warm-up included.
    """
    warmup = warmup_steps(total_steps, config)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    decay_steps, cooldown_start = total_steps - warmup, total_steps - config.cooldown
    if config.schedule is Schedule["cosine"]:
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay_steps)) * config.lr
    if config.schedule is Schedule["linear"]:  # to 0, as in DPR and transformers' get_linear_schedule_with_warmup
        return config.lr * (total_steps - step) / decay_steps
    if config.schedule is Schedule["const"] or step < cooldown_start:
        return config.lr
    left = 1 - (step - cooldown_start) / (total_steps - cooldown_start)
    return left**config.cooldown_power * (config.lr - config.cooldown_end) + config.cooldown_end
