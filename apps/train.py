"""Train a model: one script for one device, several GPUs and several machines.

    python apps/train.py                                              # one CPU or GPU
    torchrun --standalone --nproc_per_node=2 apps/train.py            # several processes on this machine

Workers of the data loaders import this module again, so what is slow to import waits until ``main`` needs it.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig, OmegaConf

import srforge
from composition import announced_once, compose_quietly
from schema import register
from srforge.distributed import rank_entrypoint

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@announced_once
@rank_entrypoint
def main(config: DictConfig) -> None:
    """Build everything the configuration names, and train."""
    from building import batch_sizes, build, plain
    from reporting import announce, build_hooks, build_trackers, launch_folder, report
    from run_folder import open_run_folder
    from srforge.data import DataLoaderFactory
    from srforge.distributed import get_active_strategy, plan_of, refuse_fsdp, seed_epoch, setup_device
    from srforge.training import (
        CheckpointStore,
        ExponentialMovingAverage,
        RunnerOptions,
        Schedule,
        Trainer,
        TrainerOptions,
        TrainingRunner,
        ValidationRunner,
    )

    settings = plain(config)
    training, system, run = settings["training"], settings["system"], settings["run"]
    refuse_fsdp(settings)

    # Model and devices: from here on every part asks the same strategy.
    if run["seed"] is not None:
        seed_epoch(run["seed"], 0, 0)  # the same first weights on every rank; rank 0's are sent to the others anyway
    chosen = system["distributed"].get("strategy") or system["strategy"] or settings["strategy"] or "auto"
    train_set, val_set = build(config.data.train), build(config.data.validation)
    model, device = setup_device(
        build(config.model), system["device"], train_set, options={**system["distributed"], "strategy": chosen}
    )
    strategy = get_active_strategy()
    sizes = batch_sizes(training, strategy.world_size)
    folder, seed = open_run_folder(settings, sizes.global_batch, launch_folder(), strategy)

    # Data: each rank gets its share of the order that (seed, epoch) decide.
    loading = {"num_workers": system["num_workers"], "seed": seed, "device": device}
    train_loader = DataLoaderFactory(
        train_set,
        sizes.per_rank,
        shuffle=True,
        accumulate=sizes.accumulate,
        tail=training["tail"],
        steps_per_epoch=training["steps_per_epoch"],
        **loading,
    ).get_loader()
    val_loader = None
    if val_set is not None:
        val_loader = DataLoaderFactory(
            val_set, training["validation_batch_size"], shuffle=False, **loading
        ).get_loader()

    # Optimization.
    plan = plan_of(train_loader)
    assert plan is not None  # the data sets of this script have a length
    num_steps = plan.num_steps * training["epochs"]
    optimizer = build(config.optimizer)([p for p in model.parameters() if p.requires_grad])
    factory = config.scheduler.factory
    filled = (
        {"total_steps": training["max_steps"] or num_steps} if factory is not None and "total_steps" in factory else {}
    )
    scheduler = None if factory is None else build(factory, **filled)(optimizer)
    schedule = Schedule(scheduler, config.scheduler.interval, config.scheduler.monitor)
    ema = None if training["ema_decay"] is None else ExponentialMovingAverage(model, training["ema_decay"])

    # The loops.
    names = ("precision", "channels_last", "compile", "deterministic", "max_norm", "non_finite")
    options = RunnerOptions(accumulate=sizes.accumulate, **{name: training[name] for name in names})
    runner = TrainingRunner(model, optimizer, build(config.objective), schedule=schedule, ema=ema, options=options)
    upscale = build(config.data.baseline)
    baseline = None if upscale is None else lambda batch: upscale(batch["lr"])
    validator = ValidationRunner(model, build(config.metrics), ema=ema, baseline=baseline, options=options)

    # The run.
    trackers = build_trackers(config.tracking, folder, settings)
    limits = ("monitor", "mode", "patience", "validate_every", "max_steps", "max_minutes", "main_work_timeout_minutes")
    trainer = Trainer(
        runner,
        validator,
        seed=seed,
        checkpoints=CheckpointStore(folder / "checkpoints", keep_last=run["keep_last"]),
        tracker=trackers,
        hooks=build_hooks(trackers, validator, settings),
        options=TrainerOptions(
            config_text=OmegaConf.to_yaml(config),
            stop_file=folder / "stop",
            **{name: training[name] for name in limits},
        ),
    )
    announce(strategy, sizes, num_steps, model, folder)
    if settings["dry_run"]:
        return
    trainer.resume(run["resume"])
    result = trainer.train(training["epochs"], train_loader, val_loader)
    report(result, settings)


if __name__ == "__main__":
    srforge.init()
    with compose_quietly():
        main()
