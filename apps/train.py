"""Train a model: one script for one device, several GPUs and several machines.

    python apps/train.py                                              # one CPU or GPU
    torchrun --standalone --nproc_per_node=2 apps/train.py            # several processes on this machine

Workers of the data loaders import this module again, so what is slow to import waits until ``main`` needs it.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

import srforge
from composition import announced_once, compose_quietly, print_any_name
from schema import register
from srforge.distributed import rank_entrypoint

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@announced_once
@rank_entrypoint
def main(config: DictConfig) -> None:
    """Build everything the configuration names, and train."""
    from assembly import distributed_options, make_loader, make_model, make_runners, seed_first_weights, trainer_options
    from building import batch_sizes, build, plain
    from reporting import announce, build_hooks, build_trackers, launch_folder, report
    from run_folder import open_run_folder
    from srforge.distributed import get_active_strategy, setup_device
    from srforge.training import CheckpointStore, Trainer
    from weights import export_result, start_from_weights

    settings = plain(config)
    options = distributed_options(settings)

    # Model and devices: from here on every part asks the same strategy.
    seed_first_weights(settings)
    train_set, val_set = build(config.data.train), build(config.data.validation)
    model, device = setup_device(make_model(config, settings), settings["system"]["device"], train_set, options=options)
    strategy = get_active_strategy()

    # The run's folder and seed; each rank's share of the data follows from the seed.
    sizes = batch_sizes(settings["training"], strategy.world_size)
    folder, seed = open_run_folder(settings, sizes.global_batch, launch_folder(), strategy)
    train_loader = make_loader(train_set, settings, sizes, seed, device, training=True)
    val_loader = make_loader(val_set, settings, sizes, seed, device, training=False)

    # Weights to begin with, unless the run has begun already.
    checkpoints = CheckpointStore(folder / "checkpoints", keep_last=settings["run"]["keep_last"])
    start_from_weights(model, settings["run"], checkpoints, launch_folder())

    # The loops, and the run around them.
    runner, validator = make_runners(config, settings, model, train_loader)
    trackers = build_trackers(config.tracking, folder)
    trainer = Trainer(
        runner,
        validator,
        seed=seed,
        checkpoints=checkpoints,
        tracker=trackers,
        hooks=build_hooks(trackers, validator, settings),
        options=trainer_options(config, settings, folder),
    )

    announce(strategy, sizes, train_loader, model, settings, folder)
    if settings["dry_run"]:
        return
    trainer.resume(settings["run"]["resume"])
    result = trainer.train(settings["training"]["epochs"], train_loader, val_loader)
    export_result(checkpoints, folder / "weights.safetensors")
    report(result, settings)


if __name__ == "__main__":
    srforge.init(preload=("hydra", "omegaconf"))
    print_any_name()
    with compose_quietly():
        main()
