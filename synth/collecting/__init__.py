"""Running a plan on GPUs: workers that time, a journal that keeps, measurements files in the end."""

from synth.collecting.journal import JournalError, read_journal
from synth.collecting.pools import InlinePool, Pool, ProcessPool, find_gpus, gpu_name
from synth.collecting.reporters import (
    CollectSummary,
    Drift,
    Progress,
    Reporter,
    RichReporter,
    SilentReporter,
    duration,
)
from synth.collecting.results import add_file, journal_to_measurements
from synth.collecting.runner import GPU_RUNNER, Runner, RunnerSpec
from synth.collecting.running import Limits, collect
from synth.collecting.simulated import Fault, SimulatedRunner, simulated_runner
from synth.errors import OutOfMemory, StickyError, TacticError

__all__ = [
    "GPU_RUNNER",
    "CollectSummary",
    "Drift",
    "Fault",
    "InlinePool",
    "JournalError",
    "Limits",
    "OutOfMemory",
    "Pool",
    "ProcessPool",
    "Progress",
    "Reporter",
    "RichReporter",
    "Runner",
    "RunnerSpec",
    "SilentReporter",
    "SimulatedRunner",
    "StickyError",
    "TacticError",
    "add_file",
    "collect",
    "duration",
    "find_gpus",
    "gpu_name",
    "journal_to_measurements",
    "read_journal",
    "simulated_runner",
]
