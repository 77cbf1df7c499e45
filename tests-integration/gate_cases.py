"""What each rank does in the tests of gates."""

from pathlib import Path

from harness import asked_backend, asked_device


def rank_has_side_effects(folder):
    """Fire every kind of gated handler once; each leaves a file that names its rank."""
    import asyncio

    import torch

    from srforge.distributed import get_active_strategy, is_main_process, main_process_only, setup_device

    class Handlers:
        def inherited(self):
            leave("inherited")

    @main_process_only
    class Gated(Handlers):
        def method(self):
            leave("method")

        @staticmethod
        def static():
            leave("static")

        @classmethod
        def of_class(cls):
            leave("of_class")

        async def upload(self):
            leave("upload")

    def leave(what):
        Path(folder, f"{what}-{get_active_strategy().rank}").touch()

    gated = Gated()  # built before the strategy is known: the gate decides at each call
    setup_device(torch.nn.Linear(1, 1), asked_device(), options={"backend": asked_backend()})
    gated.method()
    gated.static()
    gated.of_class()
    gated.inherited()
    asyncio.run(gated.upload())
    main_process_only(leave)("function")
    leave("ungated")
    return is_main_process()


def rank_calls_a_collective_inside_a_gate():
    """Every collective of ours, and the checks built on them, inside a gate."""
    import torch

    from srforge.distributed import CollectiveError, MetricSum, get_active_strategy, main_process_only, setup_device

    model, _ = setup_device(
        torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)),
        asked_device(),
        options={"backend": asked_backend()},
    )
    strategy = get_active_strategy()
    calls = {
        "reduce_metrics": lambda: strategy.reduce_metrics({"m": MetricSum(1.0, 1)}),
        "check_replicas": lambda: strategy.check_replicas(model),
        "sync_buffers": lambda: strategy.sync_buffers(model),
        "barrier": strategy.barrier,
        "all_gather_object": lambda: strategy.all_gather_object(1),
        "broadcast_object": lambda: strategy.broadcast_object(1),
    }
    refused = {}
    for name, call in calls.items():

        @main_process_only
        def save_preview(call=call):
            call()

        try:
            save_preview()
        except CollectiveError as error:
            refused[name] = str(error)
    return refused, strategy.all_gather_object(strategy.rank)
