"""Trains on several ranks: `accelerate launch -m srpo_env.trainers.srpo RECIPE [key=value ...]`.

The first rank is `srpo-env train` with the same arguments; the others score their shares of each batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

from srpo_env import cli
from srpo_env.errors import MissingExtra, SrpoEnvError
from srpo_env.jobs import Job
from srpo_env.trainers.srpo.ranks import ranks_of_this_job
from srpo_env.training import use_threads


def main() -> int:
    """Runs this process's part; returns its exit code."""
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise MissingExtra(
            "several ranks need the package 'accelerate', which is not installed: pip install 'srpo-env[accelerate]'."
        ) from error
    PartialState()  # joins the ranks, and chooses this one's device
    ranks = ranks_of_this_job()
    if not ranks.leads:
        return _follow(sys.argv[1:])
    try:
        return cli.run(["train", *sys.argv[1:]])
    finally:
        ranks.tell(None)
        if dist.is_initialized():
            dist.destroy_process_group()


def _follow(arguments: Sequence[str]) -> int:
    """Does with the learner what the first rank does with its own; whatever is wrong, that one says."""
    logging.getLogger("srpo_env").setLevel(logging.CRITICAL)
    words = [each for each in arguments if not each.startswith("-")]
    try:
        named = bool(words) and "=" not in words[0]
        job = Job.prepare(words[0] if named else cli.DEFAULT_RECIPE, words[1:] if named else words)
        use_threads(job.recipe.threads)
        learner = job.trainer()
        for order, subject in ranks_of_this_job().orders():
            getattr(learner, order)(subject)
    except SrpoEnvError:
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
