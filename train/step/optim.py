"""AdamW with weight decay on the same parameters as open_clip, and its learning-rate schedules."""

import math
from collections.abc import Iterable

from torch.nn import Parameter
from torch.optim import AdamW

from dyad.data.base.errors import ConfigError
from dyad.train.config import OptimConfig, Schedule

FUSED = {"cpu", "cuda"}  # devices for which torch has AdamW as one kernel


def build_optimizer(named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig) -> AdamW:
    """Build AdamW over the parameters that require gradients.

    named_parameters: (name, parameter) pairs. config: learning rate, betas and weight decay. No weight decay for
    parameters with fewer than two dimensions, or with bn, ln, bias or logit_scale in their name, as in open_clip_train
    3.3. Raises ConfigError if no parameter requires gradients.
    """
    trained = {id(p): (name, p) for name, p in named_parameters if p.requires_grad}.values()
    if not trained:
        raise ConfigError("nothing trains: both towers are frozen and the temperature does not learn")
    plain = [p for name, p in trained if decays(name, p)]
    without = [p for name, p in trained if not decays(name, p)]
    groups = [{"params": plain, "weight_decay": config.weight_decay}, {"params": without, "weight_decay": 0.0}]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=all(p.device.type in FUSED for _, p in trained),
    )


def decays(name: str, parameter: Parameter) -> bool:
    """Whether AdamW applies weight decay to a parameter.

    Not if it has fewer than two dimensions, or bn, ln, bias or logit_scale in its name.
    """
    return parameter.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Compute the learning rate of optimiser step `step` (from 0): linear warm-up, then config.schedule.

    total_steps: the number of optimiser steps of the run, warm-up included.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    decay_steps, cooldown_start = total_steps - config.warmup, total_steps - config.cooldown
    if config.schedule is Schedule["cosine"]:
        return 0.5 * (1 + math.cos(math.pi * (step - config.warmup) / decay_steps)) * config.lr
    if config.schedule is Schedule["linear"]:  # to 0, as in DPR and transformers' get_linear_schedule_with_warmup
        return config.lr * (total_steps - step) / decay_steps
    if config.schedule is Schedule["const"] or step < cooldown_start:
        return config.lr
    left = 1 - (step - cooldown_start) / (total_steps - cooldown_start)
    return left**config.cooldown_power * (config.lr - config.cooldown_end) + config.cooldown_end
