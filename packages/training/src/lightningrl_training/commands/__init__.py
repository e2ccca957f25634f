"""Commands of `lightningrl` on recipes and runs, a file each: its options, and what it prints. What takes long to
import is imported when a command runs."""

from lightningrl.commands import describe_command
from lightningrl_training.commands import (
    branch,
    certify,
    doctor,
    evaluate,
    export,
    init,
    recipe,
    redteam,
    rescore,
    runs,
    serve,
    sweep,
    train,
    try_one,
    tune,
    xray,
)

__all__ = ["COMMANDS"]

COMMANDS = (
    describe_command(branch.branch),
    describe_command(certify.certify),
    describe_command(doctor.doctor),
    describe_command(evaluate.evaluate, "eval"),
    describe_command(export.export),
    describe_command(init.init),
    describe_command(recipe.recipes),
    describe_command(redteam.redteam),
    describe_command(rescore.rescore),
    describe_command(runs.runs_group),
    describe_command(serve.serve),
    describe_command(sweep.sweep),
    describe_command(train.train),
    describe_command(try_one.try_recipe, "try"),
    describe_command(tune.tune),
    describe_command(xray.xray),
)
